"""What all tables have in common: names of constraints, types, and MariaDB's manners."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Double, Integer, MetaData, String, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import DeclarativeBase

#: MariaDB compares texts without case unless told; node names and UUIDs are what they are.
MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
#: MariaDB's TEXT ends at 64 KiB, which a decision about a large cluster can pass.
DOCUMENT = Text().with_variant(mysql.LONGTEXT(), "mysql")
#: Only INTEGER counts by itself in SQLite.
SERIAL = BigInteger().with_variant(Integer(), "sqlite")

NAME = String(128)


class Base(DeclarativeBase):
    """Names every index and constraint the same way on all three databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {int: BigInteger, float: Double, str: String(255)}  # noqa: RUF012
    __table_args__: Any = MYSQL
