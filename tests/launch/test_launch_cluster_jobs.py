"""Runs as text: what is refused, what is rendered, and that no value says more than itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml
from cluster_stubs import SAYS_ITS_WORDS, Stubs

from armillary.launch.job import Job, name_of
from armillary.launch.kubernetes import Kubernetes
from armillary.launch.skypilot import SkyPilot
from armillary.launch.slurm import Slurm
from armillary.launch.torchrun import Torchrun

HOSTILE = (
    "a'b",
    'a"b',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "$$",
    "a b",
    "*",
    "a\nb",
    "é#",
    "\\",
)
COMMON: dict[str, Any] = {"name": "tiny", "nodes": 2, "gpus_per_node": 4}
POD: dict[str, Any] = {"image": "registry/armillary:1", "volumes": ("data:/data",)}


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    made = Stubs(tmp_path)
    made.add("armillary", SAYS_ITS_WORDS)
    made.add("torchrun", SAYS_ITS_WORDS)
    return made


def hostile(kind: type[Job], **more: Any) -> Any:
    return kind(recipe=("debug", *HOSTILE), run="/data/my $(touch pwned) run", **COMMON, **more)


def test_slurm_passes_every_word_on_to_each_machine_as_it_was_typed(stubs: Stubs) -> None:
    job = hostile(Slurm, env=("SAID=it's $HOME",), setup="true # it's")
    assert stubs.run(job.render()).returncode == 0
    for node in range(2):
        assert stubs.words(node) == [
            *job.command()[1:],
            *("--node-rank", str(node), "--meet", "127.0.0.1:29500"),
        ]
    assert not (stubs.folder / "pwned").exists()


def test_skypilot_passes_every_word_on_as_it_was_typed(stubs: Stubs) -> None:
    job = hostile(SkyPilot, storage="s3://bucket", setup="true # it's")
    script = yaml.safe_load(job.render())["run"]
    made = stubs.run(script, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1")
    assert made.returncode == 0
    assert stubs.words() == [*job.command()[1:], "--node-rank", "1", "--meet", "10.0.0.1:29500"]
    assert not (stubs.folder / "pwned").exists()


def test_torchrun_passes_every_word_on_as_it_was_typed(stubs: Stubs) -> None:
    job = hostile(Torchrun, hosts=("first", "second"), min_nodes=1, setup="true # it's")
    assert stubs.run(job.render()).returncode == 0
    words = stubs.words()
    assert words[: words.index("--")] == [
        "--nnodes=1:2",
        "--nproc-per-node=4",
        "--max-restarts=3",
        "--rdzv-id=tiny",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=first:29500",
        "-m",
    ]
    assert words[words.index("--") + 1 :] == [
        *("armillary", "train", "debug"),
        *(*HOSTILE, "--run", "/data/my $(touch pwned) run"),
    ]
    assert not (stubs.folder / "pwned").exists()


def test_torchrun_without_hosts_takes_the_meeting_machine_as_its_argument(stubs: Stubs) -> None:
    job = Torchrun(recipe=("debug",), **COMMON)
    made = stubs.run(job.render())
    assert made.returncode and "give the name of one of them" in made.stderr
    assert not list(stubs.folder.glob("words-*"))
    assert stubs.run(f"set -- first\n{job.render()}").returncode == 0
    assert "--rdzv-endpoint=first:29500" in stubs.words()
    assert "bash tiny.sh HOST, on each machine" in job.next_step("tiny.sh")


def test_slurm_names_the_option_for_what_it_writes_itself() -> None:
    job = Slurm(name="tiny", sbatch=("nodes=8", "comment=x"), partition="big", cpus_per_node=4)
    assert [problem.fix for problem in job.problems()] == ["--nodes"]
    written = [line.removeprefix("#SBATCH --") for line in job.render().splitlines()]
    directives = [line.partition("=")[0] for line in written if line in {*job._directives()}]
    for name in set(directives) - {"comment"}:
        assert Slurm(name="tiny", sbatch=(name,)).problems(), name


def filled_in(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does: `$(NAME)` is the variable where there is one, `$$` is a dollar."""
    rule = re.compile(r"\$\$|\$\(([^)]*)\)")
    return rule.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


@pytest.mark.parametrize("setup", ["", "source it"])
@pytest.mark.parametrize("manifest", ["jobset", "trainjob"])
def test_kubernetes_passes_every_word_on_as_it_was_typed(manifest: Any, setup: str) -> None:
    job = hostile(Kubernetes, manifest=manifest, setup=setup, **POD)
    last = list(yaml.safe_load_all(job.render()))[-1]["spec"]
    node = last.get("trainer") or container(last)
    variables = {"NODE_RANK": "1", "PET_NODE_RANK": "1"}
    variables |= {"PET_MASTER_ADDR": "tiny-node-0-0.tiny", "PET_MASTER_PORT": "29400"}
    words = [filled_in(word, variables) for word in [*node["command"], *node["args"]]]
    first = "tiny-trainer-0-0.tiny:29500"
    meeting = first if manifest == "jobset" else "tiny-node-0-0.tiny:29400"
    script = 'source it\ntest "$?" = 0 || exit 1\nexec "$@"'
    shell = ["bash", "-c", script, "armillary-node"] if setup else []
    assert words == [*shell, *job.command(), "--node-rank", "1", "--meet", meeting]


@pytest.mark.parametrize("kind", [Slurm, SkyPilot, Torchrun])
def test_nothing_is_started_where_the_setup_fails(kind: type[Job], stubs: Stubs) -> None:
    more: dict[str, Any] = {"hosts": ("a", "b")} if kind is Torchrun else {}
    text = kind(recipe=("debug",), setup="true; false", **COMMON, **more).render()
    script = yaml.safe_load(text)["run"] if kind is SkyPilot else text
    assert stubs.run(script).returncode == 1
    assert not list(stubs.folder.glob("words-*"))


def test_a_claim_may_be_seen_at_two_places() -> None:
    job = Kubernetes(recipe=("debug",), image="a/b", volumes=("data:/a", "data:/b"), **COMMON)
    document = yaml.safe_load(job.render())["spec"]
    seen = {each["name"]: each["mountPath"] for each in container(document)["volumeMounts"]}
    assert seen == {"volume-0": "/a", "volume-1": "/b"}
    assert job.folder == "/a/runs/tiny"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("5", 300), ("5:30", 330), ("1:2:3", 3723), ("1-2", 93_600), ("1-2:3", 93_780), ("0", 0)],
)
def test_a_limit_is_above_the_warning_before_it(time: str, seconds: int) -> None:
    def refused(signal_seconds: int) -> bool:
        job = Slurm(name="tiny", time=time, signal_seconds=signal_seconds)
        return any("is not above" in problem.message for problem in job.problems())

    if seconds:
        assert not refused(min(seconds - 1, 65_535))
        assert refused(seconds) or seconds > 65_535
    else:
        assert not refused(300)  # no limit


def container(job_set: dict[str, Any]) -> dict[str, Any]:
    template = job_set["replicatedJobs"][0]["template"]["spec"]["template"]
    found: dict[str, Any] = template["spec"]["containers"][0]
    return found


MODELS = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": kubeflow.TrainerV1alpha1ClusterTrainingRuntime,
}
RICH = {
    "namespace": "team",
    "queue": "gpus",
    "secrets": ("hub",),
    "cpus_per_node": 32,
    "memory_per_node": "512Gi",
    "shared_memory": "64Gi",
    "resources": ("rdma/hca=8",),
    "env": ("NCCL_DEBUG=WARN",),
    "setup": "ulimit -n 65536",
}


@pytest.mark.parametrize("more", [{}, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("manifest", ["jobset", "trainjob"])
def test_manifests_are_read_in_full_by_the_models_of_their_own_schema(
    manifest: Any, more: dict[str, Any]
) -> None:
    job = Kubernetes(recipe=("debug",), manifest=manifest, **COMMON, **POD, **more)
    assert job.problems() == []
    for document in yaml.safe_load_all(job.render()):
        model = MODELS[document["kind"]].from_dict(document)
        assert model.to_dict() == document  # a field that the schema lacks would be gone


@pytest.mark.parametrize("manifest", ["jobset", "trainjob"])
def test_on_kubernetes_75_is_replaced_uncounted_and_2_is_final(manifest: Any) -> None:
    job = Kubernetes(recipe=("debug",), manifest=manifest, **COMMON, **POD)
    first = next(yaml.safe_load_all(job.render()))["spec"]
    job_set = first if manifest == "jobset" else first["template"]["spec"]
    spec = job_set["replicatedJobs"][0]["template"]["spec"]
    codes = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {(75,): "Ignore", (2,): "FailJob"}
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (2, 2, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert job_set["failurePolicy"]["maxRestarts"] == 3
    assert job_set["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_skypilot_reads_its_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="SkyPilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    job = SkyPilot(recipe=("debug",), **COMMON, storage="s3://bucket", infra="aws", use_spot=True)
    task = yaml.safe_load(job.render())
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_skypilot_recovers_75_and_keeps_the_checkpoints_elsewhere() -> None:
    job = SkyPilot(recipe=("debug",), **COMMON, storage="s3://bucket/")
    task = yaml.safe_load(job.render())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "--checkpoint.folder s3://bucket/tiny " in task["run"]


REFUSED = [
    (Slurm, {"nodes": 0}, "--nodes 0"),
    (Slurm, {"gpus_per_node": -1}, "--gpus-per-node -1"),
    (Slurm, {"ranks_per_node": 9}, "--ranks-per-node 9"),
    (Slurm, {"port": 80}, "--port 80"),
    (Slurm, {"name": "a b"}, "--name 'a b'"),
    (Slurm, {"name": "x" * 41}, "--name"),
    (Slurm, {"run": "a\nb"}, "--run"),
    (Slurm, {"sbatch": ("nodes=8",)}, "--sbatch nodes=8: the job says itself what nodes is"),
    (Slurm, {"sbatch": ("time=1",)}, "--sbatch time=1: the job says itself"),
    (Slurm, {"sbatch": ("no-requeue",)}, "--sbatch no-requeue: the job says itself"),
    (Slurm, {"setup": "true\nscontrol show config"}, "--setup"),
    (Slurm, {"partition": "big\n#SBATCH --account=other"}, "--partition"),
    (Slurm, {"account": "a b"}, "--account"),
    (Slurm, {"sbatch": ("reservation=a b",)}, "--sbatch"),
    (Slurm, {"sbatch": ("--reservation=a",)}, "--sbatch"),
    (Slurm, {"sbatch": ("",)}, "--sbatch"),
    (Slurm, {"setup": "export HF_TOKEN='hf_abc'; true"}, "--setup looks as if"),
    (SkyPilot, {"install": "pip install https://me:hunter2@host/a.whl"}, "--install looks as if"),
    (Slurm, {"time": "tomorrow"}, "--time"),
    (Slurm, {"signal_seconds": 0}, "--signal-seconds 0"),
    (Slurm, {"env": ("HF_TOKEN=hf_abc",)}, "HF_TOKEN=... looks like a secret"),
    (Slurm, {"env": ("PROXY=http://me:hunter2@host/",)}, "PROXY=... looks like a secret"),
    (Slurm, {"env": ("1A=b",)}, "--env"),
    (Slurm, {"recipe": ("debug", "--a", "https://me:hunter2@host/")}, "a user or a password"),
    (Torchrun, {"min_nodes": 3}, "--min-nodes 3"),
    (Torchrun, {"hosts": ("a",)}, "1 --hosts for --nodes 2"),
    (Torchrun, {"hosts": ("a", "b c")}, "--hosts"),
    (SkyPilot, {}, "--storage and --run are not given"),
    (SkyPilot, {"storage": "s3://me:hunter2@bucket"}, "--storage"),
    (Kubernetes, {**POD, "image": "a b"}, "--image"),
    (Kubernetes, {**POD, "volumes": ("data:data",)}, "--volumes"),
    (Kubernetes, {**POD, "run": "/elsewhere"}, "is on no volume"),
    (Kubernetes, {**POD, "run": "/database/x"}, "is on no volume"),
    (Kubernetes, {**POD, "run": "/data/../x"}, "is on no volume"),
    (Kubernetes, {**POD, "namespace": "A_b"}, "--namespace"),
    (Kubernetes, {**POD, "secrets": ("A_b",)}, "--secrets"),
    (Kubernetes, {**POD, "memory_per_node": "much"}, "--memory-per-node"),
    (Kubernetes, {**POD, "resources": ("rdma",)}, "--resources"),
]


@pytest.mark.parametrize(("kind", "changes", "said"), REFUSED)
def test_what_cannot_work_or_would_show_a_secret_is_refused(
    kind: type[Job], changes: dict[str, Any], said: str
) -> None:
    values: dict[str, Any] = {"recipe": ("debug",), **COMMON} | changes
    messages = [problem.message for problem in kind(**values).problems()]
    assert any(said in message for message in messages), messages
    assert "hunter2" not in "".join(messages) and "hf_abc" not in "".join(messages)


def test_a_secret_may_be_read_on_the_machine() -> None:
    assert not Slurm(name="tiny", setup='export HF_TOKEN="$(cat ~/.token)"').problems()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("llama3-8b", "llama3-8b"),
        ("my/path/Big_Run.toml", "big-run"),
        ("recipes.py:tiny", "tiny"),
        ("7b", "run-7b"),
        ("...", "run"),
        ("x" * 60, "x" * 40),
    ],
)
def test_a_job_is_named_after_its_recipe(recipe: str, name: str) -> None:
    assert name_of(recipe) == name
    assert not Slurm(name=name_of(recipe)).problems()
