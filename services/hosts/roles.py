"""From a role's name to the coroutine that runs it. Imports happen inside: each role loads only its own."""

from collections.abc import Coroutine
from typing import Any, Literal

from common.config import Config

ServiceRole = Literal["gateway", "scheduler", "prefill", "decode", "mixed", "attention", "predictor"]


def service_of(role: ServiceRole, config: Config) -> Coroutine[Any, Any, None]:
    """Runs the service until it is told to stop."""
    match role:
        case "gateway":
            from gateway.service import run_gateway
            from services.model_directory import model_directory

            return run_gateway(config, model_directory(config.model))
        case "scheduler":
            from services.hosts.scheduler_host import run_scheduler

            return run_scheduler(config)
        case "attention":
            from attention.service import run_attention

            return run_attention(config)
        case "predictor":
            from services.length_predictor.service import run_predictor

            return run_predictor(config)
        case "prefill" | "decode" | "mixed":
            from services.hosts.instance_host import run_instance

            return run_instance(config, role)
