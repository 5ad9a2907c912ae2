"""``lamella explain --policies``: what each placement policy would have cost on the live traffic."""

from collections.abc import Sequence

from rich.table import Column, Table

from scheduler.regret import Hindsight, PolicyRegret, RegretReport
from services.printing import output_console

UNITS = {"prefill": "TTFT", "decode": "TPOT"}


def add_up_regrets(reports: Sequence[RegretReport]) -> RegretReport:
    """Of several schedulers, at least one, whose settings are one file's."""
    policies: dict[tuple[str, str], PolicyRegret] = {}
    hindsight: dict[str, Hindsight] = {}
    for report in reports:
        for regret in report.policies:
            key = regret.phase, regret.policy
            policies[key] = regret if key not in policies else policies[key].plus(regret)
        for seen in report.hindsight:
            known = hindsight.get(seen.phase)
            hindsight[seen.phase] = seen if known is None else known.plus(seen)
    first = reports[0]
    spent_s = sum(report.spent_s for report in reports)
    return RegretReport(
        first.prefill_policy,
        first.decode_policy,
        spent_s,
        list(policies.values()),
        list(hindsight.values()),
    )


def print_regrets(report: RegretReport) -> None:
    """Means of what was summed up, in milliseconds."""
    console = output_console()
    # A name that is cut off cannot be typed: where the terminal is narrow other columns wrap.
    policy = Column("policy", no_wrap=True)
    table = Table("phase", policy, "decides", "judged", "predicted", "mean regret", "best choice", box=None)
    deciding = {"prefill": report.prefill_policy, "decode": report.decode_policy}
    for each in sorted(report.policies, key=lambda each: (UNITS[each.phase] == "TPOT", each.regret_s)):
        is_used = each.policy == deciding[each.phase]
        table.add_row(
            each.phase,
            each.policy,
            "yes" if is_used else "",
            str(each.decisions),
            f"{UNITS[each.phase]} {1e3 * each.cost_s / each.decisions:.2f} ms",
            f"{1e3 * each.regret_s / each.decisions:.2f} ms",
            f"{each.best / each.decisions:.0%}",
            style="bold" if is_used else None,
        )
    console.print(table if report.policies else "no decision has been judged yet", highlight=False)
    for seen in report.hindsight:
        console.print(
            f"{UNITS[seen.phase]} of {seen.requests} requests: predicted"
            f" {1e3 * seen.predicted_s / seen.requests:.2f} ms, measured"
            f" {1e3 * seen.measured_s / seen.requests:.2f} ms, off by"
            f" {1e3 * seen.error_s / seen.requests:.2f} ms on average",
            highlight=False,
        )
