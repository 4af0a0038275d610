"""The settings tree: preset, then file, then environment. Read once, and the only reader of the environment."""

from .auth import ApiKeySettings, AuthSettings, JwtSettings, LimitSettings, QuotaSettings
from .cache import CacheSettings, RedisSettings
from .loading import SettingsError, caller_token, dump_settings, load_settings
from .monitoring import MonitoringSettings, TracingSettings
from .routing import (
    BUILTIN_MODEL,
    BUILTIN_MODEL_NAME,
    AdmissionSettings,
    ModelSettings,
    PoolSettings,
    RemoteSettings,
    VariantSettings,
)
from .section import Section
from .server import ServerSettings
from .source import SettingsSource
from .tree import Settings, default_cache_dir

__all__ = [
    "BUILTIN_MODEL",
    "BUILTIN_MODEL_NAME",
    "AdmissionSettings",
    "ApiKeySettings",
    "AuthSettings",
    "CacheSettings",
    "JwtSettings",
    "LimitSettings",
    "ModelSettings",
    "MonitoringSettings",
    "PoolSettings",
    "QuotaSettings",
    "RedisSettings",
    "RemoteSettings",
    "Section",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SettingsSource",
    "TracingSettings",
    "VariantSettings",
    "caller_token",
    "default_cache_dir",
    "dump_settings",
    "load_settings",
]
