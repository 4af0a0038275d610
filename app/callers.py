"""Who calls an endpoint of FastAPI's side."""

from typing import Any

from fastapi import Depends, Request

from auth.authenticator import Authenticator, Everyone
from auth.principal import Principal


class Callers:
    def __init__(self, authenticator: Authenticator | Everyone) -> None:
        self._authenticator = authenticator

    def with_scope(self, scope: str) -> Any:
        """A dependency: the caller, who must have this scope."""

        async def find(request: Request) -> Principal:
            header = request.headers.get("authorization")
            principal = await self._authenticator.authenticate(None if header is None else header.encode("latin-1"))
            access = request.state.access
            access.tenant, access.subject = principal.tenant, principal.subject
            principal.check_scope(scope)
            return principal

        return Depends(find)
