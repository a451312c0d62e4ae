"""The prompt cache of a command, `--prompt-cache FOLDER`."""

from collections.abc import Callable
from pathlib import Path

from sfi_core.engine.prompt_cache import FILE, PromptCache, check_folder
from sfi_core.errors import InputError

WORTH = 256  # tokens that a prompt must add to what the folder has, to be written there


class PromptFolder:
    """A `PromptCache`, read from a folder and written back; without a folder it is in memory alone."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        """Load the folder's prompt; a damaged one is said, and read anew. Raises what `check_folder` does."""
        self._folder, self._say, self.cache = None if folder is None else check_folder(folder), say, PromptCache()
        if self._folder is not None and (self._folder / FILE).exists():
            try:
                self.cache = PromptCache.load(self._folder)
            except InputError as error:
                say(f"{error}; the prompt is read whole")
        self._kept = self.cache.tokens

    def path(self, name: str) -> Path | None:
        """Return the path of a file beside the prompt; None without a folder."""
        return None if self._folder is None else self._folder / name

    def keep(self) -> None:
        """Write the last prompt to the folder, if it has much that is not there; a disk that is full is said."""
        tokens = self.cache.tokens
        new = len(tokens) - self.cache.agreed(self._kept)
        if self._folder is None or not new or (self._kept and new < WORTH):
            return
        self._say(f"writing {len(tokens):,} tokens, {self.cache.nbytes / 1e6:,.1f} MB, to {self._folder}")
        try:
            self.cache.save(self._folder)
        except OSError as error:
            self._say(f"prompt cache {self._folder} cannot be written: {error.strerror}")
        else:
            self._kept = tokens
