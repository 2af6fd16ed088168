"""What a running comparison shows: live bars on a terminal, a line for each trial that ended."""

from __future__ import annotations

from rich.console import Console
from rich.progress import TaskID

from geonorm.progress_bar import ProgressBar, line_of
from geonorm.report.results import Trial as TrialResult
from geonorm.sweep.executors import Running
from geonorm.sweep.trial import Trial


class Display(ProgressBar):
    """Progress of trials: below the bar of all one for each that runs; a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.num_trials = self.num_finished = self.all_steps = self.finished_steps = 0
        self._tasks: dict[str, TaskID] = {}
        self.begin("all trials", 0, "steps")

    def expect(self, trials: list[Trial]) -> None:
        """Count on more trials; a search does not know all of them when it begins."""
        self.num_trials += len(trials)
        self.all_steps += sum(trial.config.steps for trial in trials)
        self._show_all()

    def start(self, running: Running) -> None:
        """Show a trial that begins."""
        if self._bar is not None:
            self._tasks[running.trial.id] = self._bar.add_task(running.trial.id, total=running.trial.config.steps)

    def progress(self, running: Running) -> None:
        """Show a trial's latest step and loss."""
        if self._bar is not None:
            step, loss, total = running.row.get("step", 0), running.row.get("loss"), running.trial.config.steps
            line = line_of(running.trial.id, step, total, "steps", *([] if loss is None else [f"loss {loss:.3f}"]))
            self._bar.update(self._tasks[running.trial.id], completed=step, description=line)
            self._show_all()

    def finish(self, trial: Trial, result: TrialResult) -> None:
        """Say how a trial ended."""
        self.num_finished += 1
        self.finished_steps += trial.config.steps
        if self._bar is not None and trial.id in self._tasks:
            self._bar.remove_task(self._tasks.pop(trial.id))
        self._show_all()
        self.say(f"[{self.num_finished}/{self.num_trials}] {_ending(trial, result)}")

    def _show_all(self) -> None:
        # Elsewhere a line for each trial tells enough.
        if self._bar is not None:
            under_way = sum(task.completed for task in self._bar.tasks if task.id in self._tasks.values())
            self.show(self.finished_steps + under_way, self.all_steps)


def _ending(trial: Trial, result: TrialResult) -> str:
    name = "  ".join([trial.variant] * bool(trial.variant) + [f"{trial.label}  lr {trial.lr:g}  seed {trial.seed}"])
    if result.status == "ok":
        return f"{name}: validation loss {result.val_loss:.4f} after {result.seconds:.0f} s of training"
    return f"{name}: {result.status} ({result.message})"
