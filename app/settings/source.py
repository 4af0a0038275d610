"""Where the settings come from, for a process that reads them again."""

from hashlib import blake2b
from pathlib import Path

from .loading import DEFAULT_FILE, load_settings
from .tree import Settings


class SettingsSource:
    """A file and a preset, as `load_settings` takes them, and the environment. Which file it is does not change: one
    that is gone is an error, and no reason to go on with the defaults. All of it blocks."""

    def __init__(self, file: Path | None = None, preset: str | None = None) -> None:
        self.file = file or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
        self._preset = preset
        self._read: bytes | None = None  # a digest of what was read last

    def load(self) -> Settings:
        """Raises: SettingsError."""
        self._read = self.digest()  # before it is read: what is written meanwhile is a change
        return load_settings(self.file, self._preset)

    def digest(self) -> bytes | None:
        """Of the file's content; None: there is none. Contents are compared, and not times: they hang neither on a
        file system's clock nor on what links lead to the file, as those of a ConfigMap in Kubernetes."""
        if self.file is None:
            return None
        try:
            return blake2b(self.file.read_bytes(), digest_size=16).digest()
        except OSError:
            return None

    def has_changed(self, digest: bytes | None) -> bool:
        """Whether this is not what was read last."""
        return digest != self._read
