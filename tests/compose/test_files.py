"""What docker-compose.yml, the Dockerfile and the servers' files promise, checked without an engine."""

import re
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest
import yaml  # type: ignore[import-untyped]

from common.bus import CLOSE_TIMEOUT_S
from common.config import MeshConfig
from common.config_file import ENVIRONMENT, load_config
from common.http import HTTP_STOP_TIMEOUT_S
from common.messages import Role
from common.secret_files import FILE_VARIABLES
from common.service import DRAIN_GRACE_S
from services.hosts.roles import ServiceRole
from services.launcher.launch_plan import ALLOCATOR_ENVIRONMENT
from tests.compose.stack import why_no_engine

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROLES: tuple[str, ...] = get_args(ServiceRole)
GPU_ROLES = ("prefill", "decode", "attention")
SERVING = (*ROLES, *(f"{role}-gpu" for role in GPU_ROLES))
OBSERVING = ("prometheus", "grafana")
PUBLISHED = ("gateway", *OBSERVING)
STAYING = tuple(name for name in SERVICES if name != "credentials")
OWN_URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "No such file or directory"),
        ("echo Server: >&2; echo no daemon here >&2; exit 1", "`docker info` ended with 1: no daemon here"),
        ("exit 0", None),
    ],
)
def test_where_no_engine_answers_it_is_known_why(
    program: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        docker = tmp_path / "docker"
        docker.write_text(f"#!/bin/sh\n{program}\n")
        docker.chmod(0o700)
    why = why_no_engine(())
    assert why == said or (why is not None and said is not None and said in why)


def test_every_role_has_a_service_of_its_name() -> None:
    assert set(SERVICES) == {"credentials", "nats", "redis", *SERVING, *OBSERVING}
    for name in SERVING:
        assert SERVICES[name]["command"][:2] == ["serve", name.removesuffix("-gpu")]


@pytest.mark.parametrize("name", STAYING)
def test_a_service_is_checked_and_started_again(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_bounded_and_without_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert service["logging"]["options"]["max-size"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])


@pytest.mark.parametrize("name", SERVING)
def test_a_service_is_checked_by_what_takes_little_processor_time(name: str) -> None:
    """The command line takes five times as much to be imported: over a check's time where cores are busy."""
    assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "python", "-m", "services.healthcheck", OWN_URL]


def ask_healthcheck(url: str) -> subprocess.CompletedProcess[str]:
    """What a container runs; on its standard error, what was imported."""
    command = [sys.executable, "-X", "importtime", "-m", "services.healthcheck", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_check_tells_a_service_that_is_ready_from_one_that_is_not() -> None:
    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if is_ready and self.path == "/health/ready" else 503)
            self.end_headers()

    is_ready = True
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        asked = ask_healthcheck(url)
        assert asked.returncode == 0, asked.stderr
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in asked.stderr.splitlines()}
        assert loaded.isdisjoint({"asyncio", "msgspec", "rich", "typer", "torch"})
        is_ready = False
        assert ask_healthcheck(url).returncode == 1
        server.shutdown()
    assert ask_healthcheck(url).returncode == 1


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_be_scaled_unless_it_is_the_published_one(name: str) -> None:
    assert "container_name" not in SERVICES[name]
    assert ("ports" in SERVICES[name]) == (name in PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ports_are_this_machines_own_by_default(name: str) -> None:
    for port in SERVICES[name]["ports"]:
        assert re.fullmatch(r"\$\{LAMELLA_[A-Z_]+:-127\.0\.0\.1:(\d+)\}:\1", port)


def test_the_gateway_serves_its_page_where_it_is_published_and_knows_an_admin_key() -> None:
    settings = {
        key: str(each) for key, each in SERVICES["gateway"]["environment"].items() if each is not None
    }
    gateway = load_config(None, {key: settings[key] for key in settings if key.startswith("LAMELLA_PRIVATE")})
    assert (gateway.gateway.private_host, gateway.gateway.private_port) == ("0.0.0.0", 8001)
    assert any(each.endswith(":8001") for each in SERVICES["gateway"]["ports"])
    key_file = Path(settings["LAMELLA_ADMIN_KEY_FILE"])
    assert f"gateway-secrets:{key_file.parent}:ro" in SERVICES["gateway"]["volumes"]
    assert set(SERVICES["scheduler"]["volumes"]) < set(SERVICES["gateway"]["volumes"])


@pytest.mark.parametrize("role", SERVING)
def test_a_service_waits_for_its_servers_to_be_healthy(role: str) -> None:
    conditions = SERVICES[role]["depends_on"]
    assert conditions["nats"] == conditions["redis"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("role", SERVING)
def test_a_stop_is_given_more_time_than_a_drain_takes(role: str) -> None:
    grace_s = int(SERVICES[role]["stop_grace_period"].removesuffix("s"))
    assert grace_s > MeshConfig().drain_timeout_s + DRAIN_GRACE_S + CLOSE_TIMEOUT_S + HTTP_STOP_TIMEOUT_S


@pytest.mark.parametrize("role", SERVING)
def test_an_instance_computes_on_a_number_of_cores_that_is_told_it(role: str) -> None:
    """Containers cannot see which cores others use."""
    environment = SERVICES[role]["environment"]
    threads = environment.get("LAMELLA_THREADS")
    computes = role.removesuffix("-gpu") in (*get_args(Role), "attention")
    assert threads == ("${LAMELLA_THREADS:-1}" if computes else None)
    assert load_config(None, {"LAMELLA_THREADS": "1"}).model.threads == 1


def test_attention_workers_are_there_for_who_asks() -> None:
    """Instances keep their own KV otherwise, and nobody would bind a worker."""
    assert SERVICES["attention"]["profiles"] == ["attention"]
    workers = SERVICES["decode"]["environment"]["LAMELLA_ATTENTION_WORKERS"]
    assert workers == "${LAMELLA_ATTENTION_WORKERS:-0}"
    settings = load_config(ROOT / "deploy" / "compose.toml", {"LAMELLA_ATTENTION_WORKERS": "2"})
    assert settings.instance.attention_workers == 2
    # Any number serves, also as many as 2, which divide no model's 3 KV heads; and every decode instance.
    assert settings.instance.attention_partition == "requests"
    assert settings.attention.decode_instances >= settings.scaling.max_decode


def test_what_not_every_mesh_has_is_there_for_who_asks() -> None:
    of_profiles = {name for name in SERVICES if "profiles" in SERVICES[name]}
    assert of_profiles == {
        "attention",
        "mixed",
        "predictor",
        *(f"{role}-gpu" for role in GPU_ROLES),
        *OBSERVING,
    }


def test_the_observers_read_the_files_of_this_repository() -> None:
    arguments = dict(each.split("=", 1) for each in SERVICES["prometheus"]["command"])
    mounted = {
        target: ROOT / source
        for name in OBSERVING
        for source, target, _ in (each.split(":") for each in SERVICES[name]["volumes"] if each[0] == ".")
    }
    settings = SERVICES["grafana"]["environment"]
    for place in (arguments["--config.file"], settings["GF_PATHS_PROVISIONING"]):
        (directory,) = (each for each in mounted if place.startswith(f"{each}/"))
        assert (mounted[directory] / Path(place).relative_to(directory)).exists()
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    ports = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    private_port = SERVICES["gateway"]["environment"]["LAMELLA_PRIVATE_PORT"]
    # A gateway's public port may want keys, for metrics too.
    assert ports == {name: private_port if name == "gateway" else 8000 for name in SERVING}


def test_an_instance_on_a_gpu_is_of_the_other_image_and_told_so() -> None:
    for role in GPU_ROLES:
        service, plain = SERVICES[f"{role}-gpu"], SERVICES[role]
        assert service["profiles"] == ["attention-gpu" if role == "attention" else "gpu"]
        assert service["build"]["args"] == {"STACK": "cuda"}
        assert service["image"] == f"{plain['image']}-cuda"
        variable = "LAMELLA_ATTENTION_DEVICE" if role == "attention" else "LAMELLA_DEVICE"
        assert service["environment"] == {**plain["environment"], variable: "cuda"}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["device_ids"] == [f"${{LAMELLA_{role.upper()}_GPU:-0}}"]
    assert load_config(None, {"LAMELLA_DEVICE": "cuda"}).model.device == "cuda"
    assert load_config(None, {"LAMELLA_ATTENTION_DEVICE": "cuda"}).attention.device == "cuda"


def test_every_secret_is_a_file_that_only_its_readers_mount() -> None:
    secrets = {
        name: [str(each).partition(":")[0] for each in service["volumes"] if "-secrets:" in each]
        for name, service in SERVICES.items()
    }
    assert secrets == {
        "credentials": [
            *("service-secrets", "nats-secrets", "redis-secrets", "grafana-secrets", "gateway-secrets")
        ],
        "prometheus": [],
        "grafana": ["grafana-secrets"],
        "nats": ["nats-secrets"],
        "redis": ["redis-secrets"],
        **{name: ["service-secrets"] for name in SERVING},
        "gateway": ["service-secrets", "gateway-secrets"],
    }
    for name in STAYING:
        assert all(each.endswith(":ro") for each in SERVICES[name]["volumes"] if "-secrets:" in each)
        assert not {"NATS_URL", "REDIS_URL"} & set(SERVICES[name].get("environment", {}))
    for server in ("nats", "redis", "grafana"):
        condition = SERVICES[server]["depends_on"]["credentials"]
        assert condition == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("name", SERVING)
def test_a_model_of_ones_own_is_converted_into_a_volume(name: str) -> None:
    """The image's file system is read-only, and holds the default model's conversion."""
    volumes, environment = SERVICES[name]["volumes"], SERVICES[name]["environment"]
    assert "${LAMELLA_MODELS:-models}:/models:ro" in volumes
    assert environment["LAMELLA_CACHE"] == "/var/cache/lamella${LAMELLA_MODEL:+-own}"
    assert "conversions:/var/cache/lamella-own" in volumes
    assert "LAMELLA_CACHE=/var/cache/lamella \\" in DOCKERFILE


def test_a_length_predictor_is_there_for_who_asks_and_the_scheduler_asks_it_then() -> None:
    for name in ("scheduler", "predictor"):
        assert SERVICES[name]["environment"]["LAMELLA_PREDICTOR"] == "${LAMELLA_PREDICTOR:-none}"
    assert load_config(None, {"LAMELLA_PREDICTOR": "history"}).predictor.kind == "history"


def test_the_mesh_has_no_way_out() -> None:
    assert COMPOSE["networks"]["mesh"] == {"internal": True}
    assert SERVICES["credentials"]["network_mode"] == "none"
    for name in STAYING:
        assert SERVICES[name]["networks"] == (["mesh", "edge"] if name in PUBLISHED else ["mesh"])


def test_only_variables_that_are_read_are_set() -> None:
    published = ("PUBLISH", "PUBLISH_PRIVATE", "PROMETHEUS", "GRAFANA")
    of_compose = ("TAG", *published, "MODELS", *(f"{role.upper()}_GPU" for role in GPU_ROLES), "METRICS_KEPT")
    known = {*ENVIRONMENT, *FILE_VARIABLES, *(f"LAMELLA_{each}" for each in of_compose)}
    text = DOCKERFILE + (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"\b(?:LAMELLA_[A-Z_]+|(?:NATS|REDIS)_URL(?:_FILE)?)\b", text)) <= known


def test_the_settings_file_is_one_that_lamella_reads() -> None:
    config = load_config(ROOT / "deploy" / "compose.toml", {})
    assert config.transfer.path == "mooncake"
    assert config.scaling.policy == "dry_run"


def test_the_image_sets_what_the_launcher_sets() -> None:
    for key, value in ALLOCATOR_ENVIRONMENT.items():
        assert f"{key}={value}" in DOCKERFILE


def locked(name: str) -> set[str]:
    """Names of a lock's packages."""
    return set(re.findall(r"^([\w.-]+)==", (ROOT / name).read_text(), re.MULTILINE))


def test_the_image_holds_the_projects_torch_and_none_of_its_development_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch=="))
    assert re.search(rf"{re.escape(torch)}\s", DOCKERFILE)
    tools = {re.split(r"[<>=~!;\[ ]", each)[0] for each in project["optional-dependencies"]["dev"]}
    runs, develops = (locked(name) for name in ("requirements.lock", "requirements-dev.lock"))
    assert tools <= develops
    assert runs.isdisjoint(develops)
    assert re.findall(r"\S*requirements\S*", DOCKERFILE) == ["requirements.lock", "requirements.lock"]


def test_the_cuda_image_holds_the_projects_mooncake_of_cuda() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (mooncake,) = project["optional-dependencies"]["cuda"]
    assert re.search(rf"{re.escape(mooncake)};", DOCKERFILE)


def test_the_images_last_stage_runs_as_a_numbered_user() -> None:
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last_stage, re.MULTILINE) == ["10001:10001"]
    assert SERVICES["gateway"]["user"] == "10001:10001"


def test_every_package_of_the_code_is_let_into_the_build() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    top_level = {package.partition(".")[0] for package in project["tool"]["setuptools"]["packages"]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert top_level <= allowed
