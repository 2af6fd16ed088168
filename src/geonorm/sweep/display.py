"""What a running comparison shows: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from geonorm.experiments.process import Running
from geonorm.experiments.trials import Trial


class Display:
    """Progress of trials of ``steps`` steps each; a context manager."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.num_trials, self.num_finished, self.steps = 0, 0, steps
        self._bars: dict[str, TaskID] = {}
        self._live = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._all = self._live.add_task("all trials", total=0, loss="")

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def expect(self, count: int) -> None:
        """Count on so many more trials; a search does not know all of them when it begins."""
        self.num_trials += count
        if self._live:
            self._live.update(self._all, total=self.num_trials * self.steps)

    def start(self, running: Running) -> None:
        """Show a trial that begins."""
        if self._live:
            self._bars[running.trial.id] = self._live.add_task(running.trial.id, total=self.steps, loss="")

    def progress(self, running: Running) -> None:
        """Show a trial's latest step and loss."""
        if self._live:
            step, loss = running.row.get("step", 0), running.row.get("loss")
            text = "" if loss is None else f"loss {loss:.3f}"
            self._live.update(self._bars[running.trial.id], completed=step, loss=text)
            under_way = sum(self._live.tasks[bar].completed for bar in self._bars.values())
            self._live.update(self._all, completed=self.num_finished * self.steps + under_way)

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def finish(self, trial: Trial, result: dict[str, Any]) -> None:
        """Say how a trial ended."""
        self.num_finished += 1
        if self._live:
            if trial.id in self._bars:
                self._live.remove_task(self._bars.pop(trial.id))
            self._live.update(self._all, completed=self.num_finished * self.steps)
        self.console.print(
            f"[{self.num_finished}/{self.num_trials}] {_ending(trial, result)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _ending(trial: Trial, result: dict[str, Any]) -> str:
    name = f"{trial.label}  lr {trial.training.lr:g}  seed {trial.training.seed}"
    if result["status"] == "ok":
        return f"{name}: validation loss {result['val_loss']:.4f} after {result['seconds']:.0f} s of training"
    return f"{name}: {result['status']} ({result['message']})"
