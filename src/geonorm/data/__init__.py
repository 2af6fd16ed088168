"""Text to token windows: reading, splitting by document, byte-level BPE, packed token files."""

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.data.corpus import Corpus, prepared
    from geonorm.data.pipeline import prepare
    from geonorm.data.standard_library import StandardLibrarySource
    from geonorm.data.token_file import TokenFile
    from geonorm.data.windows import Windows

# Wanted ids of a tokenizer that is trained on the text.
VOCAB_SIZE = 2048

__all__ = ["VOCAB_SIZE", "Corpus", "StandardLibrarySource", "TokenFile", "Windows", "prepare", "prepared"]
# Imported when first named, so that the command line can show its help without loading numpy.
__getattr__ = names_from(
    __name__,
    {
        "Corpus": "corpus",
        "StandardLibrarySource": "standard_library",
        "TokenFile": "token_file",
        "Windows": "windows",
        "prepare": "pipeline",
        "prepared": "corpus",
    },
)
