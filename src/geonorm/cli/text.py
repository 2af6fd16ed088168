"""``--data`` of the commands that train."""

import json
from collections.abc import Sequence

from geonorm.errors import UserError

_DECIDED = ("vocab_size", "val_fraction", "test_fraction", "min_documents", "max_share", "group_by", "dedup")


def data_overrides(data: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Overrides of a recipe that put this text in place of its own.

    Args:
        data: one prepared folder, or what `geonorm.data.prepare` takes; nothing for the recipe's own.
        overrides: what else is given on the command line.

    Raises:
        UserError: they ask for something that a prepared corpus has decided already.
    """
    if not data:
        return []
    from geonorm.data import prepared

    folder = prepared(data)
    if folder is None or len(data) > 1:
        return ["data.corpus=null", f"data.sources={json.dumps(list(data))}"]
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in [f"data.{name}" for name in _DECIDED]:
            raise UserError(f"`{key}` is given, but {folder} is a prepared corpus, which has decided it; leave it out")
    return ["data.sources=[]", f"data.corpus={json.dumps(str(folder))}"]
