"""What a running comparison shows: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from geonorm.report.results import Trial as TrialResult
from geonorm.sweep.executors import Running
from geonorm.sweep.trial import Trial


class Display:
    """Progress of trials; a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.num_trials, self.num_finished = 0, 0
        self.all_steps, self.finished_steps = 0, 0
        self._bars: dict[str, TaskID] = {}
        self._under_way: dict[str, int] = {}
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

    def expect(self, trials: list[Trial]) -> None:
        """Count on more trials; a search does not know all of them when it begins."""
        self.num_trials += len(trials)
        self.all_steps += sum(trial.config.steps for trial in trials)
        if self._live:
            self._live.update(self._all, total=self.all_steps)

    def start(self, running: Running) -> None:
        """Show a trial that begins."""
        if self._live:
            self._bars[running.trial.id] = self._live.add_task(
                running.trial.id, total=running.trial.config.steps, loss=""
            )

    def progress(self, running: Running) -> None:
        """Show a trial's latest step and loss."""
        if self._live:
            step, loss = running.row.get("step", 0), running.row.get("loss")
            text = "" if loss is None else f"loss {loss:.3f}"
            self._live.update(self._bars[running.trial.id], completed=step, loss=text)
            self._under_way[running.trial.id] = step
            self._live.update(self._all, completed=self.finished_steps + sum(self._under_way.values()))

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def finish(self, trial: Trial, result: TrialResult) -> None:
        """Say how a trial ended."""
        self.num_finished += 1
        self.finished_steps += trial.config.steps
        self._under_way.pop(trial.id, None)
        if self._live:
            if trial.id in self._bars:
                self._live.remove_task(self._bars.pop(trial.id))
            self._live.update(self._all, completed=self.finished_steps)
        self.console.print(
            f"[{self.num_finished}/{self.num_trials}] {_ending(trial, result)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _ending(trial: Trial, result: TrialResult) -> str:
    name = "  ".join([trial.variant] * bool(trial.variant) + [f"{trial.label}  lr {trial.lr:g}  seed {trial.seed}"])
    if result.status == "ok":
        return f"{name}: validation loss {result.val_loss:.4f} after {result.seconds:.0f} s of training"
    return f"{name}: {result.status} ({result.message})"
