"""What all sections of the settings have in common."""

import ipaddress
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_safe_url(url: str) -> bool:
    """Whether nobody on the way can change what comes from there."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname == "localhost" or is_loopback(parts.hostname or "")
