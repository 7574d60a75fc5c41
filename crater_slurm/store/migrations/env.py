"""What Alembic runs: the migrations, on the connection and in the transaction it was given."""

from __future__ import annotations

from alembic import context

from crater_slurm.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
