"""What happens to a simulated mesh beside its requests: faults, operators who scale it, plans that do, what
is predicted of lengths, and what is kept of prompts."""

import numpy as np

from services.simulator.autoscaling import Autoscaling
from services.simulator.cluster import Cluster
from services.simulator.config import ScaleStep
from services.simulator.faults import Faults
from services.simulator.instance import SimulatedInstance
from services.simulator.prediction import InaccuratePredictor, PredictionConfig
from services.simulator.prefixes import InstancePrefixes, KnownPrefixes, PrefixConfig

CALLS = 1
"""Beside the seed, of draws: whose call each is hangs on nothing else that is drawn."""


def begin_life(cluster: Cluster, seed: int) -> KnownPrefixes | None:
    """Once its instances are there. Whoever knows prefixes is to be told of requests that come."""
    simulated = cluster.simulated
    cluster.schedulers.chance = np.random.default_rng([seed, CALLS])
    Faults(cluster, simulated.faults, seed).start()
    if simulated.prediction is not None:
        predictor = _predictor_of(cluster, simulated.prediction, seed)
        cluster.schedulers.predict_by(predictor.predict, simulated.prediction.delay_s)
    for step in simulated.scale:
        _scale_at(cluster, step)
    if simulated.settings.scaling.policy != "off":
        leader = cluster.schedulers.leader
        autoscaling = Autoscaling(
            simulated.settings, cluster.clock, leader.state, cluster.staff, leader.open_mail
        )
        cluster.schedulers.listen(autoscaling)
        autoscaling.start()
    return None if simulated.prefix is None else _keep_prefixes(cluster, simulated.prefix)


def _predictor_of(cluster: Cluster, prediction: PredictionConfig, seed: int) -> InaccuratePredictor:
    return InaccuratePredictor(prediction, seed, lambda request: cluster.gateway.length_left(request, 0))


def _keep_prefixes(cluster: Cluster, prefix: PrefixConfig) -> KnownPrefixes:
    known = KnownPrefixes(prefix, cluster.simulated.kv_token_bytes)

    def join(instance: SimulatedInstance) -> None:
        instance.prefill.prefixes = InstancePrefixes(known, known.cache())

    cluster.on_join.append(join)
    for instance in cluster.instances.values():
        join(instance)
    return known


def _scale_at(cluster: Cluster, step: ScaleStep) -> None:
    cluster.clock.at(step.at_s, lambda: cluster.staff.scale_pool(step.pool, step.count))
