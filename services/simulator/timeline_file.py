"""A simulated mesh's timeline as the file that ``lamella trace`` writes of a live one."""

from pathlib import Path

from services.output_files import write_whole
from services.simulator.cluster import Cluster
from services.simulator.gateway import GATEWAY
from services.simulator.timeline import LANE, SimulatedTimeline
from services.tracing.collect import Clock, MeshTrace, ServiceTrace
from services.tracing.file import chrome_trace
from services.tracing.layout import lay_out

ONE_CLOCK = Clock(offset_ns=0, round_trip_ns=0)


def write_timeline(path: Path, cluster: Cluster, timeline: SimulatedTimeline) -> None:
    """Of a run that is over. Raises ConfigError where nothing can be written."""
    timeline.add_lives(GATEWAY, cluster.records)
    timeline.add_changes(cluster.history.changes)
    write_whole("--timeline", path, chrome_trace(lay_out(mesh_trace(cluster, timeline))))


def mesh_trace(cluster: Cluster, timeline: SimulatedTimeline) -> MeshTrace:
    """An instance's kind is the role that it ended with, or of one that never was ready would have had."""
    terms = cluster.staff.terms.items()
    kinds: dict[str, str] = {str(name): term.pool.config.role for name, term in terms}
    kinds |= {str(each.instance_id): each.role for each in cluster.lives}
    if cluster.workers is not None:
        kinds |= dict.fromkeys(cluster.workers.names, "attention")
    services = tuple(
        ServiceTrace(
            name, kinds.get(name.partition(LANE)[0], "gateway"), "simulated", number, ONE_CLOCK, recording
        )
        for number, (name, recording) in enumerate(timeline.recordings().items(), 1)
    )
    return MeshTrace(0, timeline.ended_ns, services, silent=())
