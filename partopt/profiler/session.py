"""One run of measuring: every microbatch size of one model, and what remains if it is stopped."""

from __future__ import annotations

from partopt.documents.profile import Model, Profile
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.device import describe_device, describe_environment, hold_still
from partopt.profiler.larger import LargeMeasurer
from partopt.profiler.measurer import Measurer
from partopt.profiler.quality_checks import note_busy_machine, note_overhead
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


def measure_subject(subject: Subject, identity: Model) -> Profile:
    """The profile of all microbatch sizes; the model is left without gradients.

    Raises as `partopt.profiler.measure` does.
    """
    measurer, settings = _measurer(subject), subject.settings
    with hold_still(settings.device):
        try:
            with measurer.placed():
                for size in settings.microbatch_sizes:
                    measurer.measure(size)
        except KeyboardInterrupt:
            raise ProfilingStopped(_collect(measurer, identity)) from None
        except Exception as error:
            finished = _collect(measurer, identity)
            if finished is None:
                raise
            raise ProfilingStopped(finished, error) from error
        finally:
            subject.model.zero_grad(set_to_none=True)
    profile = _collect(measurer, identity)
    if profile is None:
        raise _nothing_fits(settings.microbatch_sizes)
    return profile


def _measurer(subject: Subject) -> Measurer:
    return LargeMeasurer(subject, subject.within) if subject.within else Measurer(subject)


def _nothing_fits(sizes: tuple[int, ...]) -> PartoptError:
    smaller = "a smaller model, or `dtype=bfloat16`"
    return PartoptError(
        "every microbatch size ran out of memory",
        f"try {smaller if sizes[0] == 1 else 'a smaller size: `microbatch_sizes=[1]`'}",
        ANSWER_IS_NO,
        code="out-of-memory",
        microbatch_sizes=list(sizes),
    )


def _collect(measurer: Measurer, model: Model) -> Profile | None:
    """The profile of the sizes measured so far, or None where none was measured whole."""
    if all(measurement.out_of_memory for measurement in measurer.measurements):
        return None
    subject = measurer.subject
    return Profile(
        model=model,
        device=describe_device(subject.settings.device),
        environment=describe_environment(subject.settings.device),
        dtype=subject.settings.dtype_name,
        layers=measurer.layers,
        measurements=measurer.measurements,
        notes=[
            *measurer.notes,
            *note_overhead(measurer.measurements),
            *note_busy_machine(subject.clock),
        ],
    )
