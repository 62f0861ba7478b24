"""One run of measuring: every microbatch size of one model, and what remains if it is stopped."""

from __future__ import annotations

from msgspec import structs

from partopt.documents import Note
from partopt.documents.profile import Group, Model, Profile
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.compilation import open_compiled
from partopt.profiler.device import describe_environment, hold_still
from partopt.profiler.estimating.clock import RooflineClock
from partopt.profiler.estimating.estimator import Estimator
from partopt.profiler.measurer import Measurer
from partopt.profiler.precision import under_autocast
from partopt.profiler.quality_checks import (
    note_busy_machine,
    note_overhead,
    note_uneven_layers,
)
from partopt.profiler.resume import check_same_subject
from partopt.profiler.subject import Subject


class ProfilingStopped(BaseException):
    """Profiling ended before all sizes were measured: by `error`, or by Ctrl-C where that is None.

    `profile` holds the microbatch sizes that were finished; only after Ctrl-C may it be None. Not
    an Exception, so that code which catches those lets Ctrl-C through, as it does
    KeyboardInterrupt.
    """

    def __init__(self, profile: Profile | None, error: Exception | None = None) -> None:
        super().__init__(
            f"profiling was stopped: {error}" if error else "profiling was interrupted"
        )
        self.profile = profile
        self.error = error


def measure_subject(subject: Subject, identity: Model, resumed: Profile | None = None) -> Profile:
    """The profile of all microbatch sizes; the model is left without gradients.

    Those that `resumed` holds are taken from it. Raises as `partopt.profiler.measure` does.
    """
    with (
        hold_still(subject.settings.device),
        open_compiled(subject) as plain,
        under_autocast(plain) as ready,
    ):
        if resumed is not None:
            check_same_subject(resumed, identity, ready)
        return _measure_sizes(_measurer(ready, resumed), identity)


def _measure_sizes(measurer: Measurer, identity: Model) -> Profile:
    subject, settings = measurer.subject, measurer.subject.settings
    try:
        with measurer.placed():
            for size in settings.microbatch_sizes:
                measurer.measure(size)
    except KeyboardInterrupt as interrupt:
        raise ProfilingStopped(_collect_new(measurer, identity)) from interrupt
    except Exception as error:
        finished = _collect_new(measurer, identity)
        if finished is None:
            raise
        raise ProfilingStopped(finished, error) from error
    finally:
        subject.model.zero_grad(set_to_none=True)
    profile = _collect(measurer, identity)
    if profile is None:
        raise _nothing_fits(settings.microbatch_sizes)
    return profile


def _measurer(subject: Subject, resumed: Profile | None) -> Measurer:
    if isinstance(subject.clock, RooflineClock):
        return Estimator(subject, subject.clock)
    return Measurer(subject, resumed)


def _nothing_fits(sizes: tuple[int, ...]) -> PartoptError:
    smaller = "a smaller model, or `dtype=bfloat16`"
    return PartoptError(
        "every microbatch size ran out of memory",
        f"try {smaller if sizes[0] == 1 else 'a smaller size: `microbatch_sizes=[1]`'}",
        ANSWER_IS_NO,
        code="out-of-memory",
        microbatch_sizes=list(sizes),
    )


def _collect_new(measurer: Measurer, model: Model) -> Profile | None:
    """The profile of the sizes measured so far, or None where none is new."""
    return _collect(measurer, model) if measurer.has_new else None


def _collect(measurer: Measurer, model: Model) -> Profile | None:
    """The profile of the sizes measured so far, or None where none was measured whole."""
    if all(measurement.out_of_memory for measurement in measurer.measurements):
        return None
    subject = measurer.subject
    measurements = sorted(measurer.measurements, key=lambda each: each.microbatch_size)
    return Profile(
        model=structs.replace(model, tokens_per_sample=measurer.tokens_per_sample),
        device=measurer.describe_device(),
        estimated=measurer.describe_estimate(),
        environment=describe_environment(subject.settings.device),
        dtype=subject.settings.dtype_name,
        autocast=subject.settings.autocast_name,
        compiled=subject.settings.compiled,
        group=Group(ranks=subject.group.ranks) if subject.group.ranks > 1 else None,
        layers=measurer.layers or (measurer.resumed.layers if measurer.resumed else []),
        measurements=measurements,
        notes=_distinct(
            [
                *measurer.notes,
                *note_uneven_layers([name for _, name in sorted(measurer.uneven.items())]),
                *note_overhead(measurements),
                *note_busy_machine(subject),
            ]
        ),
    )


def _distinct(notes: list[Note]) -> list[Note]:
    """Each note once: those of a profile that was gone on with may come again."""
    return [note for index, note in enumerate(notes) if note not in notes[:index]]
