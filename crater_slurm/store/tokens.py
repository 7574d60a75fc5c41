"""API tokens in the database: names, scopes, and of each secret a salted hash only."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, Row, bindparam, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.store import engine as engines
from crater_slurm.store.task_records import ApiToken
from crater_slurm.store.task_tables import ApiTokenRow

_SAME = ("name", "key", "client", "salt", "digest")
_TIMES = ("created", "used", "revoked")
_COLUMNS = (
    *(getattr(ApiTokenRow, name) for name in _SAME),
    *(getattr(ApiTokenRow, f"{name}_us") for name in _TIMES),
    *(ApiTokenRow.scopes, ApiTokenRow.user_name),
)
_BY_KEY = select(*_COLUMNS).where(ApiTokenRow.key == bindparam("wanted"))
#: When a token was last used is kept this exactly: not every request need write.
_USED_SECONDS = 60.0


class ApiTokens:
    """The part of the store that is about tokens. Every method is one transaction."""

    _engine: Engine

    def add_token(self, token: ApiToken) -> None:
        """Keeps a new token. Raises UsageError when its name is taken, also by a revoked one."""
        row: dict[str, Any] = {name: getattr(token, name) for name in _SAME}
        row |= {f"{name}_us": _us(getattr(token, name)) for name in _TIMES}
        row |= {"scopes": " ".join(sorted(token.scopes)), "user_name": token.user}
        try:
            with engines.writing(self._engine) as connection:
                connection.execute(insert(ApiTokenRow).values(**row))
        except StoreError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            raise UsageError(
                f"there is a token named {token.name!r}; take another name (a revoked token keeps "
                "its name, so that the records stay clear)"
            ) from error

    def token_by_key(self, key: str) -> ApiToken | None:
        """The token of a public key, revoked or not."""
        with engines.reading(self._engine) as connection:
            row = connection.execute(_BY_KEY, {"wanted": key}).first()
        return None if row is None else _token(row)

    def api_tokens(self) -> list[ApiToken]:
        """All tokens by name, also those that are revoked."""
        query = select(*_COLUMNS).order_by(ApiTokenRow.name)
        with engines.reading(self._engine) as connection:
            return [_token(row) for row in connection.execute(query)]

    def revoke_token(self, name: str, now: float) -> bool:
        """Takes a token out of use; False when there is none of that name in use."""
        query = update(ApiTokenRow).where(
            ApiTokenRow.name == name, ApiTokenRow.revoked_us.is_(None)
        )
        with engines.writing(self._engine) as connection:
            return connection.execute(query.values(revoked_us=_us(now))).rowcount > 0

    def token_used(self, token: ApiToken, now: float) -> None:
        """Notes that a token was used, to the minute."""
        if token.used is not None and 0 <= now - token.used < _USED_SECONDS:
            return
        before = _us(now - _USED_SECONDS)
        query = update(ApiTokenRow).where(
            ApiTokenRow.name == token.name,
            or_(ApiTokenRow.used_us.is_(None), ApiTokenRow.used_us <= before),
        )
        with engines.writing(self._engine) as connection:
            connection.execute(query.values(used_us=_us(now)))


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _token(row: Row[Any]) -> ApiToken:
    fields: dict[str, Any] = {name: getattr(row, name) for name in _SAME}
    for name in _TIMES:
        us = getattr(row, f"{name}_us")
        fields[name] = None if us is None else us / 1e6
    return ApiToken(**fields, scopes=frozenset(row.scopes.split()), user=row.user_name)
