"""The recipes in examples/deploy: their commands are run, as far as that goes without a container.

The package is installed by the Dockerfile's own command from what its build context holds. The
index is replaced by wheels packed from this environment, so that nothing is downloaded.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import REPOSITORY, clean_environment

yaml = pytest.importorskip("yaml", reason="needs pyyaml, which vLLM brings")
pytest.importorskip("vllm", reason="the recipes end in the doctor, which looks for vLLM")

DEPLOY = REPOSITORY / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IN_IMAGE = "/opt/altay-kvfix"


def pack(name: str, folder: Path) -> None:
    """Make a wheel of an installed distribution."""
    distribution = importlib.metadata.distribution(name)
    tag = re.search(r"^Tag: (.*)$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    assert tag
    wheel = folder / f"{name}-{distribution.version}-{tag[1]}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(file.locate(), str(file))


def docker_commands(keyword: str) -> list[str]:
    return re.findall(rf"^{keyword} (.*)$", DOCKERFILE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the Dockerfile's pip command puts into /opt/altay-kvfix."""
    scratch = tmp_path_factory.mktemp("deploy")
    context, wheels, target = (scratch / name for name in ("context", "wheels", "target"))
    context.mkdir()
    wheels.mkdir()
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source = REPOSITORY / line[1:]
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, context / line[1:])
    for name in ("setuptools", "wrapt"):
        pack(name, wheels)

    (install,) = (c for c in docker_commands("RUN") if "pip install" in c)
    words = shlex.split(install.replace(IN_IMAGE, str(target)).replace("/src", str(context)))
    assert words[0] == "python3"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        env=clean_environment(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels)),
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of a recipe, with this interpreter for python3 and PYTHONPATH as in the recipe."""
    words = [sys.executable if w == "python3" else w for w in shlex.split(command)]
    return subprocess.run(
        words,
        env=clean_environment(PYTHONPATH=str(folder), **variables),
        cwd="/",
        capture_output=True,
        text=True,
    )


# --- the folder and the image ------------------------------------------------------------------


def test_folder_holds_us_and_wrapt_alone(folder):
    names = {re.sub(r"-[\d.]+\.dist-info$", "", path.name) for path in folder.iterdir()}
    assert names - {"__pycache__", "wrapt-stubs"} == {
        "altay_kvfix",
        "sitecustomize.py",
        "wrapt",
        "bin",
    }


def test_image_is_checked_by_the_doctor(folder):
    (doctor,) = (c for c in docker_commands("RUN") if "doctor" in c)
    done = run(doctor, folder)
    assert done.returncode == 0, done.stdout
    assert f"altay-kvfix  0.1.0, {folder}" in done.stdout


def test_image_environment():
    assert docker_commands("ENV") == [f"PYTHONPATH={IN_IMAGE}"]
    assert docker_commands("COPY")[1:] == [f"--from=build {IN_IMAGE} {IN_IMAGE}"] * 2


def test_console_script_of_the_folder(folder):
    done = run(f"{folder}/bin/altay-kvfix path", folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")


def test_one_release_of_vllm_in_all_recipes():
    texts = {path.name: path.read_text() for path in DEPLOY.iterdir()}
    tags = {tag for text in texts.values() for tag in re.findall(r"vllm-openai:(v[\d.]+)", text)}
    assert tags == set(re.findall(r"VLLM_TAG=(\S+)", DOCKERFILE)) == {"v0.32.0"}
    hosts = re.compile(r"\b(?:docker\.io|ghcr\.io|quay\.io|[a-z]+\.azurecr\.io)\b")
    assert not [name for name, text in texts.items() if hosts.search(text)]


def test_verify_commands_in_the_recipes(folder, tmp_path):
    row = {"event": "top_level_active", "pid": 1, "rule": "certified", "group_lengths": [8, 8]}
    (tmp_path / "kv.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("compose.yaml", "kubernetes.yaml"):
        (command,) = re.findall(r"python3 -m altay_kvfix verify .*", (DEPLOY / name).read_text())
        done = run(command.replace("/evidence", str(tmp_path)), folder)
        assert done.returncode == 0, done.stdout + done.stderr


# --- compose -----------------------------------------------------------------------------------


def test_compose():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["vllm"]
    context = DEPLOY / service["build"]["context"]
    assert context.resolve() == REPOSITORY
    assert (context / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    trace = service["environment"]["ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH"]
    volumes = dict(reversed(v.split(":")) for v in service["volumes"])
    assert volumes[str(Path(trace).parent)] in compose["volumes"]


# --- Kubernetes and KubeRay --------------------------------------------------------------------


def pods(name: str) -> list[dict]:
    """The pod specs of a manifest."""
    specs = []
    for manifest in yaml.safe_load_all((DEPLOY / name).read_text()):
        spec = manifest["spec"]
        if manifest["kind"] == "Deployment":
            specs.append(spec["template"]["spec"])
        elif manifest["kind"] == "RayCluster":
            groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            specs += [group["template"]["spec"] for group in groups]
    return specs


PODS = [(name, i) for name in ("kubernetes.yaml", "kuberay.yaml") for i in range(len(pods(name)))]


def environment(container: dict) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container.get("env", ())}


@pytest.mark.parametrize(("name", "index"), PODS)
def test_pod(name, index):
    pod = pods(name)[index]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} <= volumes
        for variable, value in environment(container).items():
            where = value if variable == "PYTHONPATH" else str(Path(value).parent)
            assert where in mounts, (container["name"], variable)

    (main,) = pod["containers"]
    python_path = environment(main)["PYTHONPATH"]
    filled = {m["mountPath"]: m for m in main["volumeMounts"]}[python_path]
    assert filled["readOnly"] is True
    init = pod["initContainers"][0]
    (mount,) = init["volumeMounts"]
    assert mount["name"] == filled["name"]
    assert init["command"][-1] == mount["mountPath"] + "/"


def test_every_node_of_the_ray_cluster_has_the_folder():
    assert len(pods("kuberay.yaml")) == 2


@pytest.mark.parametrize(("name", "index"), PODS)
def test_init_container_fills_a_folder_that_works(folder, tmp_path, name, index):
    shared = tmp_path / "shared"
    shared.mkdir()
    command = pods(name)[index]["initContainers"][0]["command"]
    paths = {f"{IN_IMAGE}/.": f"{folder}/.", "/altay-kvfix/": f"{shared}/"}
    subprocess.run([paths.get(word, word) for word in command], check=True)
    done = run("python3 -m altay_kvfix doctor", shared)
    assert done.returncode == 0, done.stdout
    assert str(shared) in done.stdout


def test_pod_starts_after_the_doctor(folder):
    doctor = pods("kubernetes.yaml")[0]["initContainers"][1]
    assert run(shlex.join(doctor["command"]), folder).returncode == 0


def test_service_finds_the_pods():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


# --- ray start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("existing", [None, "/a:/b"])
def test_ray_start(tmp_path, existing):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$PYTHONPATH" "$@"\n')
    ray.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if existing:
        variables["PYTHONPATH"] = existing
    done = subprocess.run(
        [DEPLOY / "ray-start.sh", "--head", "--port", "6379"],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        check=True,
    )
    path = IN_IMAGE + (f":{existing}" if existing else "")
    assert done.stdout == f"{path} start --head --port 6379\n"


# --- systemd -----------------------------------------------------------------------------------


class Repeated(dict):
    """A section in which a key may stand several times, as in a unit file."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and isinstance(self.get(key), list):
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def test_systemd_unit(folder, tmp_path):
    text = (DEPLOY / "vllm.service").read_text()
    unit = configparser.RawConfigParser(dict_type=Repeated, strict=False)
    unit.optionxform = str
    unit.read_string(text)
    service = unit["Service"]
    variables = dict(line.split("=", 1) for line in service["Environment"].splitlines())
    assert variables["PYTHONPATH"] == IN_IMAGE
    assert f"--target {IN_IMAGE}" in text

    trace = tmp_path / "kv.jsonl"
    trace.touch()
    for command in service["ExecStartPre"].splitlines():
        command = command.replace("/opt/vllm/bin/python", "python3")
        command = command.replace(variables["ZENIT_ALTAY_KV_LAYOUT_TRACE_PATH"], str(trace))
        done = run(command, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not trace.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    text = (DEPLOY / "vllm.service").read_text()
    # Only what is installed here can be found.
    text = re.sub(r"^(Exec\w+)=/opt/\S+", r"\1=/bin/true", text, flags=re.MULTILINE)
    (tmp_path / "vllm.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "vllm.service"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
