"""Text to token windows: reading, splitting by document, byte-level BPE, packed token files."""

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.data.corpus import Corpus, cache_folder, prepared
    from geonorm.data.given_tokenizer import open_tokenizer
    from geonorm.data.hub import HubSource, is_hub
    from geonorm.data.pipeline import open_sources, prepare
    from geonorm.data.sources import FileSource
    from geonorm.data.standard_library import StandardLibrarySource
    from geonorm.data.token_file import TokenFile
    from geonorm.data.windows import Windows

# Wanted ids of a tokenizer that is trained on the text.
VOCAB_SIZE = 2048

# Imported when first named, so that the command line can show its help without loading numpy.
_HOMES = {
    "Corpus": "corpus",
    "FileSource": "sources",
    "HubSource": "hub",
    "StandardLibrarySource": "standard_library",
    "TokenFile": "token_file",
    "Windows": "windows",
    "cache_folder": "corpus",
    "is_hub": "hub",
    "open_sources": "pipeline",
    "open_tokenizer": "given_tokenizer",
    "prepare": "pipeline",
    "prepared": "corpus",
}

__all__ = [
    "VOCAB_SIZE",
    "Corpus",
    "FileSource",
    "HubSource",
    "StandardLibrarySource",
    "TokenFile",
    "Windows",
    "cache_folder",
    "is_hub",
    "open_sources",
    "open_tokenizer",
    "prepare",
    "prepared",
]
__getattr__ = names_from(__name__, _HOMES)
