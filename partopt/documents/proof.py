"""What is proved of a plan, in words: the one place where a certificate becomes a sentence."""

from __future__ import annotations

from typing import NamedTuple

from partopt.documents.plan import Plan
from partopt.units import format_seconds


class Proof(NamedTuple):
    """What is proved of a plan, and among which plans: every text names these.

    `claim` is a sentence, `line` the same with what it rests on, `value` and `label` are a number
    and what it is of.
    """

    claim: str
    line: str
    value: str
    label: str


def proof_of(plan: Plan) -> Proof | None:
    """What the certificate of `plan` says; None where it has none.

    Of the planner `optimal` it speaks of simulated plans, of others of what they minimise.
    """
    certificate = plan.certificate
    if certificate is None:
        return None
    status, scope, lower_s = certificate.status, certificate.scope, certificate.lower_bound_s
    if plan.planner != "optimal":
        claim = f"{status}, among {scope}"
        return Proof(claim, f"among {scope}: {certificate.proof}", status, f"among {scope}")
    if status == "optimal":
        claim = f"optimal among {scope}"
        return Proof(claim, claim, status, f"among {scope}")
    claim = f"{status}, among {scope}"
    if not lower_s:
        return Proof(claim, claim, "no bound", f"is known of {scope}")
    label = f"faster at most is any of {scope}"
    return Proof(
        claim, f"{claim}; bound {format_seconds(lower_s)}", f"{certificate.gap:.1%}", label
    )
