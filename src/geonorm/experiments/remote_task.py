"""What runs on a machine of a Ray cluster: one trial in a process of its own, its output sent home as it comes.

Nothing here writes where the results are. What a lost or forgotten task leaves behind is a temporary folder.
"""

from __future__ import annotations

import os
import site
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import geonorm
from geonorm.experiments.corpus_transfer import CorpusOffer, find_corpus
from geonorm.experiments.process import Resources, start_process
from geonorm.experiments.trials import LOG, METRICS, RESULT, TEST_WINDOWS, Trial

_POLL_SECONDS = 0.25
_OUTPUTS = (METRICS, TEST_WINDOWS, LOG, RESULT)


def run_remotely(
    spec: dict[str, Any], offered: tuple, resources: dict[str, Any], fetch: Callable[[Any], bytes]
) -> Iterator[dict[str, Any]]:
    """Run a trial and yield what happens, by ``kind``.

    ``"no corpus"``: the machine does not have the corpus and the offer has no pieces; nothing follows.
    ``"started"``: with ``host``.
    ``"metrics"``: with ``lines``, whole lines as bytes.
    ``"ended"``: with ``returncode``, ``reason`` in words and ``files``, the bytes of each output by name.

    Args:
        spec: the trial, see :meth:`Trial.to_json`.
        offered: the fields of a :class:`CorpusOffer`.
        resources: the fields of a :class:`Resources`.
        fetch: gives the bytes of one piece of the corpus.
    """
    corpus = find_corpus(CorpusOffer(*offered), fetch)
    if corpus is None:
        yield {"kind": "no corpus"}
        return
    _let_processes_import_this_code()
    trial = Trial.from_json(spec)
    with tempfile.TemporaryDirectory(prefix="geonorm-trial-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        process = start_process(trial, folder, corpus, Resources(**resources), temporary=True)
        try:
            yield {"kind": "started", "host": socket.gethostname()}
            while process.process.poll() is None:
                if lines := process.poll_metrics():
                    yield {"kind": "metrics", "lines": lines}
                time.sleep(_POLL_SECONDS)
        finally:
            process.end()
        files = {name: (folder / name).read_bytes() for name in _OUTPUTS if (folder / name).exists()}
        yield {
            "kind": "ended",
            "returncode": process.process.returncode,
            "reason": process.reason(),
            "files": files,
        }


def _let_processes_import_this_code() -> None:
    # Ray can put code on the path of its own workers only, where a process that they start would not find it.
    home = str(Path(geonorm.__file__).parent.parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in (*site.getsitepackages(), site.getusersitepackages(), *paths):
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, home])
