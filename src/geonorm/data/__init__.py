"""Text to token windows: reading, splitting by document, byte-level BPE, packed token files."""

from geonorm.data.corpus import Corpus
from geonorm.data.packed import TokenFile
from geonorm.data.prepare import prepare
from geonorm.data.windows import Windows

__all__ = ["Corpus", "TokenFile", "Windows", "prepare"]
