"""Preparing a corpus against a plain ``datasets.map``, and memory against size: ``python -m benchmarks.prepare``.

The text is the standard-library corpus, repeated with a number before each document until a JSON lines file has the
wanted size. Each job runs in a process of its own with the same byte-level BPE and the same number of worker processes,
and the number of tokens of all jobs has to agree. Linux only. Needs about twice the largest size on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "prepare.json"
VOCAB_SIZE = 8192
TOKENIZER_BYTES = 8_000_000
EOS = "<|endoftext|>"


def write_input(path: Path, size: int) -> tuple[int, int]:
    """Write a JSON lines file with ``size`` bytes of text; returns the number of documents and bytes."""
    from geonorm.data import StandardLibrarySource

    source, documents, written, turn = StandardLibrarySource(), 0, 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            turn += 1
            for text in source.documents(Counter()):
                numbered = f"{turn}\n{text}"
                file.write(json.dumps({"text": numbered}) + "\n")
                documents, written = documents + 1, written + len(numbered.encode())
                if written >= size:
                    break
    return documents, written


def write_tokenizer(folder: Path) -> None:
    """Train the tokenizer that every job uses."""
    from geonorm.data import StandardLibrarySource
    from geonorm.data.split import Sample
    from geonorm.data.tokenizer import train_tokenizer

    sample = Sample(TOKENIZER_BYTES, StandardLibrarySource().documents(Counter())).texts()
    folder.mkdir()
    train_tokenizer(sample, VOCAB_SIZE).save(str(folder / "tokenizer.json"))


def job_geonorm(data: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """Returns the number of tokens of the text, end-of-text tokens not counted."""
    from geonorm.data import prepare

    corpus = prepare([data], tokenizer=tokenizer, workers=workers, out=folder / "out", report=print)
    facts = corpus.description
    return sum(facts["num_tokens"].values()) - sum(facts["num_documents"].values())


def job_trained(data: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """The same with a tokenizer trained on the text, for its memory; its tokens are others."""
    from geonorm.data import prepare

    prepare([data], vocab_size=VOCAB_SIZE, workers=workers, out=folder / "out", report=print)
    return 0


def job_datasets(data: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """What one would write without geonorm; neither split nor packing."""
    import datasets
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        made.encode_special_tokens = True  # lost on the way to another process
        ids = [encoding.ids for encoding in made.encode_batch_fast(batch["text"], add_special_tokens=False)]
        return {"input_ids": ids, "length": [len(row) for row in ids]}

    rows: Any = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(folder / "cache"))
    # Its default of 1,000 documents a batch.
    rows = rows.map(encode, batched=True, num_proc=workers, remove_columns=rows.column_names)
    return sum(rows["length"])


JOBS = {"geonorm": job_geonorm, "geonorm, trained BPE": job_trained, "datasets.map": job_datasets}


def measure(name: str, data: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Run one job in a process of its own and watch it."""
    with tempfile.TemporaryDirectory(prefix="geonorm-bench-", dir=data.parent) as folder:
        words = ["--job", name, str(data), str(tokenizer), folder, str(workers)]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        begun = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.prepare", *words], env=environment)
        peak = peak_main = 0
        ticks: dict[int, int] = {}
        while process.poll() is None:
            members = list(_tree(process.pid))
            peak = max(peak, sum(_field(member, "smaps_rollup", "Pss:") for member in members))
            peak_main = max(peak_main, _field(process.pid, "status", "VmRSS:"))
            ticks |= {member: spent for member in members if (spent := _ticks(member))}
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{name} failed")
        result = json.loads((Path(folder) / "result.json").read_text())
    return {
        "job": name,
        "workers": workers,
        **result,
        "wall_seconds": time.perf_counter() - begun,
        "cpu_seconds": sum(ticks.values()) / os.sysconf("SC_CLK_TCK"),
        "peak_pss_mb_all_processes": peak / 1e6,
        "peak_rss_mb_main_process": peak_main / 1e6,
    }


def _ticks(pid: int) -> int:
    """Processor time of a process so far; the processes below it are seen for themselves."""
    words = " ".join(_words(Path(f"/proc/{pid}/stat"))).rpartition(") ")[2].split()
    return int(words[11]) + int(words[12]) if words else 0


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in _words(task / "children")]
    except OSError:
        return
    for child in children:
        yield from _tree(child)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _field(pid: int, file: str, name: str) -> int:
    words = _words(Path(f"/proc/{pid}/{file}"))
    return int(words[words.index(name) + 1]) * 1024 if name in words else 0


def run_job(name: str, data: str, tokenizer: str, folder: str, workers: str) -> None:
    """Entry of the process of one job."""
    begun = time.perf_counter()
    num_tokens = JOBS[name](Path(data), Path(tokenizer), Path(folder), int(workers))
    facts = {"num_tokens": num_tokens, "seconds": time.perf_counter() - begun}
    (Path(folder) / "result.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], help="megabytes of text")
    parser.add_argument("--compare-up-to", type=int, default=100, help="megabytes up to which datasets.map runs too")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(*options.job)
        return
    import datasets
    import tokenizers

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="geonorm-bench-") as folder:
        tokenizer, data = Path(folder, "tokenizer"), Path(folder, "text.jsonl")
        write_tokenizer(tokenizer)
        for megabytes in options.sizes:
            documents, size = write_input(data, megabytes * 1_000_000)
            jobs = list(JOBS) if megabytes <= options.compare_up_to else list(JOBS)[:1]
            counted = set()
            for name in jobs:
                row = {"num_documents": documents, "num_bytes": size, **measure(name, data, tokenizer, options.workers)}
                counted |= {row["num_tokens"]} - {0}
                rows.append(row)
                print(json.dumps(row))
                versions = {"datasets": datasets.__version__, "tokenizers": tokenizers.__version__}
                facts = {"python": platform.python_version(), "cores": os.cpu_count(), **versions}
                command = f"python -m benchmarks.prepare {' '.join(sys.argv[1:])}".strip()
                options.results.write_text(json.dumps({"command": command, **facts, "rows": rows}, indent=1) + "\n")
            if len(counted) > 1:
                raise SystemExit(f"the jobs disagree about the number of tokens: {sorted(counted)}")


if __name__ == "__main__":
    main()
