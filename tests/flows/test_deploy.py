"""`dflash deploy`: what stands on the server afterwards, once and again."""

from __future__ import annotations

import importlib.resources
import json
import socket
from contextvars import copy_context
from threading import Event, Thread
from types import SimpleNamespace
from uuid import uuid4

import pytest

from dflash_core.errors import InputError
from flows import server_deployments
from flows.deploy import (
    Setup,
    _check,
    _check_root,
    _job_template,
    _root_of,
    deploy,
    merged,
    prefect_file,
)
from tests.s3 import KEY, SECRET


@pytest.mark.server
@pytest.mark.timeout(400)
def test_deploying_again_makes_nothing_twice(prefect_server):
    from prefect.client.orchestration import get_client

    def standing(client):
        pool = client.read_work_pool("dflash")
        queues = client.read_work_queues()
        return {
            "pool": pool.type,
            "queues": sorted((q.name, q.concurrency_limit) for q in queues),
            "automations": sorted(a.name for a in client.read_automations()),
            "limits": sorted(limit.name for limit in client.read_global_concurrency_limits(200)),
            "deployments": sorted(d.entrypoint for d in client.read_deployments()),
            "active": [s for d in client.read_deployments() for s in d.schedules if s.active],
        }

    with get_client(sync_client=True) as client:
        before = standing(client)
        prefect_server.deploy("--profile", "node", "-s", "gpus=2")
        after = standing(client)
        assert after["queues"] == [("cpu", None), ("default", None), ("gpu", 1)]
        assert len(after["limits"]) == len(before["limits"]) + 2
        assert len(after["automations"]) == 8
        assert after["active"] == []
        same = (
            "pool",
            "automations",
            "deployments",
        )  # another test may have set the limit of a queue
        assert {key: before[key] for key in same} == {key: after[key] for key in same}


@pytest.mark.server
@pytest.mark.timeout(400)
def test_deploying_again_keeps_what_people_set_on_the_server(prefect_server):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
    from prefect.client.schemas.schedules import CronSchedule

    from flows import automations

    hook = CustomWebhookNotificationBlock(name="ops", url="http://127.0.0.1:1/", method="POST")
    told = hook.save("ops", overwrite=True)
    by_hand = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 4 1 1 *"), active=False)
    params = {"params": {"name": "mine", "runtime": {"span_packs": 3}}}
    variables = {"env": {"TOKEN": "{{ prefect.blocks.secret.absent }}"}}

    def set_by_hand(client, limit, active, notify, minutes):
        nightly = client.read_deployment_by_name("pipeline/default")
        (schedule,) = nightly.schedules
        client.update_deployment_schedule(nightly.id, schedule.id, active=active)
        for name in ("gpu", "cpu"):
            queue = client.read_work_queue_by_name(name, work_pool_name="dflash")
            client.update_work_queue(queue.id, concurrency_limit=limit)
        automations.ensure(client, stall_minutes=minutes, start_minutes=minutes, notify=notify)
        (failed,) = client.read_automations_by_name(automations.FAILED)
        change = client.pause_automation if active else client.resume_automation
        change(failed.id)

    def standing(client):
        plan = client.read_deployment_by_name("plan/default")
        queues = [client.read_work_queue_by_name(one, "dflash") for one in ("gpu", "cpu")]
        alarms = [
            client.read_automations_by_name(name)[0]
            for name in (automations.NEVER_START, automations.STALLED, automations.FAILED)
        ]
        return {
            "nightly": client.read_deployment_by_name("pipeline/default").schedules[0].active,
            "by hand": [(one.schedule.cron, one.active) for one in plan.schedules],
            "parameters": plan.parameters,
            "variables": plan.job_variables,
            "limit": plan.global_concurrency_limit.limit,
            "queues": [queue.concurrency_limit for queue in queues],
            "alarms": [alarm.actions for alarm in alarms],
            "on": [alarm.enabled for alarm in alarms],
            "minutes": [alarm.trigger.within.total_seconds() / 60 for alarm in alarms],
        }

    with get_client(sync_client=True) as client:
        queue = client.read_work_queue_by_name("gpu", work_pool_name="dflash")
        own = client.read_deployment_by_name("plan/default")
        set_by_hand(client, 3, True, told, 45)
        client.create_deployment_schedules(own.id, [by_hand])
        client.update_deployment(
            own.id,
            DeploymentUpdate(
                parameters=params,
                job_variables=variables,
                concurrency_limit=2,
                tags=own.tags,
                description="of an older version",
                entrypoint="flows/older.py:plan",
                parameter_openapi_schema={"type": "object", "properties": {}},
            ),
        )
        try:
            before = standing(client)
            assert before["nightly"]
            assert (before["parameters"], before["queues"]) == (params, [3, 3])
            printed = prefect_server.deploy()
            assert standing(client) == before
            assert "work queue dflash/gpu, limit 3" in printed
            now = client.read_deployment_by_name("plan/default")
            assert (now.description, now.entrypoint) == (own.description, own.entrypoint)
            assert now.parameter_openapi_schema == own.parameter_openapi_schema

            prefect_server.deploy("-s", "gpu_runs=2", "-s", "stall_minutes=5", "-s", 'notify=""')
            after = standing(client)
            assert after["queues"] == [2, 3]
            assert after["minutes"][:2] == [45, 5]
            assert {action.type for alarm in after["alarms"][1:] for action in alarm} == {
                "do-nothing"
            }
        finally:
            set_by_hand(client, None, False, None, 15)
            client.update_work_queue(queue.id, concurrency_limit=queue.concurrency_limit)
            client.delete_deployment(own.id)
            prefect_server.deploy("-s", "stall_minutes=30")


class OneDeployment:
    """A server where every deployment stands already, or none; what it is told lies in `updates` and `made`."""

    def __init__(self, known):
        self.known, self.updates, self.made = known, [], []

    def read_deployment_by_name(self, name):
        from prefect.exceptions import ObjectNotFound

        if self.known is None:
            raise ObjectNotFound(RuntimeError())
        return self.known

    def update_deployment(self, _, deployment):
        self.updates.append(deployment.model_dump(exclude_unset=True))

    def create_flow_from_name(self, name):
        return name

    def create_deployment(self, flow_id, name, **fields):
        self.made.append({"flow": flow_id, "name": name, **fields})


def test_names_are_those_of_the_server_and_an_update_holds_code_only():
    env = {"AWS_REGION": "eu", "HF_HOME": "/models"}
    variables, params = {"env": env, "cpu": 4}, {"params": {"root": "mine"}}
    stands = SimpleNamespace(id=uuid4(), job_variables=variables, parameters=params)
    server = OneDeployment(stands)
    body = prefect_file(Setup())
    names = list(server_deployments.ensure(server, body, forget=["AWS_REGION"]))
    assert {"store-verify/default", "extract_units/default", "pipeline/cluster"} <= set(names)
    for update in server.updates:
        assert not update.keys() & {"parameters", "schedules", "concurrency_limit", "paused"}
        assert update["job_variables"] == {"env": {"HF_HOME": "/models"}, "cpu": 4}


def test_a_new_deployment_gets_all_that_the_file_says():
    server = OneDeployment(None)
    names = list(server_deployments.ensure(server, prefect_file(Setup())))
    assert names == [f"{one['flow']}/{one['name']}" for one in server.made]
    made = next(one for one in server.made if (one["flow"], one["name"]) == ("pipeline", "cluster"))
    assert made["parameters"]["params"]["stages_run"] == "as-deployments"
    assert made["concurrency_limit"] == 1
    assert made["concurrency_options"].collision_strategy == "ENQUEUE"
    (schedule,) = made["schedules"]
    assert (schedule.schedule.cron, schedule.active) == ("0 2 * * *", False)
    assert made["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"]


def test_parameters_that_an_older_version_had_do_not_keep_a_deployment_from_being_updated():
    params = {"params": {"name": "mine", "gone": 1, "runtime": {"units_per_run": 256}}}
    server = OneDeployment(SimpleNamespace(id=uuid4(), job_variables={}, parameters=params))
    names = list(server_deployments.ensure(server, prefect_file(Setup())))
    updates = dict(zip(names, server.updates, strict=True))
    kept = {"name": "mine", "runtime": {"child_runs": 32}}
    assert updates["extract/fan-out"]["parameters"] == {"params": kept}
    assert updates["train/default"]["parameters"] == {"params": {"name": "mine", "runtime": {}}}


def test_parameters_of_a_file_reach_the_pipeline_and_the_root_all_deployments():
    file = {"root": "data", "train": {"num_steps": 7}, "runtime": {"span_packs": 2}}
    body = prefect_file(Setup(root="s3://bucket/all"), file)
    by_name = {f"{one['entrypoint']}:{one['name']}": one for one in body["deployments"]}
    cluster = by_name["flows/pipeline.py:pipeline:cluster"]["parameters"]["params"]
    assert cluster == {
        "root": "s3://bucket/all",
        "train": {"num_steps": 7},
        "stages_run": "as-deployments",
        "runtime": {"child_runs": 32, "span_packs": 2},
    }
    gc = by_name["flows/store.py:store_gc:default"]["parameters"]
    assert gc == {"params": {"root": "s3://bucket/all"}}
    assert "parameters" not in by_name["flows/extract.py:extract_units:default"]

    params = {"params": {"root": "data", "name": "mine"}, "other": 1}
    stands = SimpleNamespace(id=uuid4(), job_variables={}, parameters=params)
    server = OneDeployment(stands)
    names = list(server_deployments.ensure(server, body, root="s3://bucket/all", anew=["pipeline"]))
    updates = dict(zip(names, server.updates, strict=True))
    assert updates["pipeline/cluster"]["parameters"] == {"params": cluster}
    mine = {"root": "s3://bucket/all", "name": "mine"}
    assert updates["train/default"]["parameters"] == {"params": mine, "other": 1}


def test_a_relative_root_is_refused_where_machines_do_not_share_it():
    for root in ("s3://bucket/prefix", "/mnt/shared", "file:///mnt/shared"):
        _check_root(root)
    standing = OneDeployment(SimpleNamespace(parameters={"params": {"root": "/mnt/shared"}}))
    _check_root(_root_of(standing, None))
    with pytest.raises(InputError, match=r"root 'data' is relative.*expected s3://.*-s root="):
        _check_root(_root_of(standing, {"name": "a file that names no root"}))
    with pytest.raises(InputError, match="root 'data' is relative"):
        _check_root(_root_of(OneDeployment(None), None))


@pytest.mark.server
@pytest.mark.timeout(400)
def test_a_cluster_gets_a_shared_root_parameters_of_a_file_and_no_token(prefect_server, tmp_path):
    from prefect.blocks.system import Secret
    from prefect.client.orchestration import get_client
    from prefect.utilities.asyncutils import run_coro_as_sync
    from prefect.utilities.templating import resolve_block_document_references

    from flows.cli import main

    Secret(value="t0ken").save("github", overwrite=True)
    file = tmp_path / "mine.yaml"
    file.write_text(f"root: {tmp_path}\nname: mine\ntrain: {{num_steps: 7}}\n")
    cluster = ["--profile", "cluster", "-s", "git=https://host/repo", "-s", f"commit={'a' * 40}"]
    with get_client(sync_client=True) as client:
        before = client.read_deployment_by_name("pipeline/cluster")
        with pytest.raises(AssertionError, match="root 'data' is relative"):
            prefect_server.deploy(*cluster)
        with pytest.raises(AssertionError, match=r"'secret/none'[\s\S]*does not exist"):
            prefect_server.deploy(*cluster, "-s", "root=/mnt", "-s", "git_token=none")
        assert client.read_deployment_by_name("pipeline/cluster") == before, "nothing was changed"
        try:
            prefect_server.deploy(*cluster, "-s", "git_token=github", "--pipeline", str(file))
            prefect_server.deploy(*cluster, "-s", "git_token=github")
            stands = client.read_deployment_by_name("pipeline/cluster")
            assert stands.parameters == {
                "params": {
                    "root": str(tmp_path),
                    "name": "mine",
                    "train": {"num_steps": 7},
                    "stages_run": "as-deployments",
                    "runtime": {"child_runs": 32},
                }
            }
            assert "t0ken" not in stands.model_dump_json()
            pull = run_coro_as_sync(resolve_block_document_references(stands.pull_steps))
            assert pull[0]["prefect.deployments.steps.git_clone"]["access_token"] == "t0ken"
        finally:
            nothing = tmp_path / "nothing.yaml"
            nothing.write_text("{}\n")
            prefect_server.deploy("--pipeline", str(nothing))
        assert client.read_deployment_by_name("pipeline/cluster").parameters == before.parameters
    file.write_text("trian: {}\n")
    with pytest.raises(SystemExit):
        main(["deploy", "--pipeline", str(file)])


@pytest.mark.server
@pytest.mark.timeout(400)
def test_stored_credentials_reach_runs_by_reference_only(prefect_server, s3_server):
    from prefect.client.orchestration import get_client
    from prefect_aws import AwsCredentials

    from flows.deploy import _blocks

    setup = Setup(store_credentials=True)
    assert list(_blocks(setup)) == ["block aws-credentials/dflash"]
    block = AwsCredentials.load("dflash")
    assert block.aws_secret_access_key.get_secret_value() == SECRET
    assert SECRET not in str(block)
    assert SECRET not in json.dumps(prefect_file(setup))
    assert KEY not in json.dumps(prefect_file(setup))

    from prefect.utilities.asyncutils import run_coro_as_sync
    from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

    prefect_server.deploy("-s", "store_credentials=true")
    with get_client(sync_client=True) as client:
        prefect_server.deploy()  # what stands stays
        stands = client.read_deployment_by_name("extract/default")
        assert SECRET not in stands.model_dump_json()
        assert KEY not in stands.model_dump_json()
        # As a worker does before it starts a run.
        template = ProcessWorker.get_default_base_job_template()
        job = run_coro_as_sync(
            ProcessJobConfiguration.from_template_and_values(template, stands.job_variables)
        )
        assert job.env["AWS_ACCESS_KEY_ID"] == KEY
        assert job.env["AWS_SECRET_ACCESS_KEY"] == SECRET
        assert job.env["AWS_ENDPOINT_URL"] == s3_server.endpoint
        prefect_server.deploy("-s", "store_credentials=false")
        assert client.read_deployment_by_name("extract/default").job_variables == {}


@pytest.mark.server
@pytest.mark.timeout(400)
def test_a_file_is_submitted_over_the_deployments_own_parameters(prefect_server, tmp_path, capsys):
    from prefect.client.orchestration import get_client

    from flows.cli import main

    prefect_server.deploy()
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntrain: {num_steps: 7}\n")
    with pytest.raises(SystemExit) as stop:
        main(["submit", "pipeline/cluster", str(file), "--set", "runtime.span_packs=2"])
    assert not stop.value.code
    with get_client(sync_client=True) as client:
        own = client.read_deployment_by_name("pipeline/cluster").parameters["params"]
        (run,) = [run for run in client.read_flow_runs() if run.name == "pipeline-mine"]
        client.delete_flow_run(run.id)
    params = run.parameters["params"]
    assert own["stages_run"] == params["stages_run"] == "as-deployments"
    assert own["runtime"]["child_runs"] == params["runtime"]["child_runs"] > 0
    assert (params["train"]["num_steps"], params["runtime"]["span_packs"]) == (7, 2)
    assert str(run.id) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["submit", "pipeline/none", str(file)])
    assert "'pipeline/none' does not exist" in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.timeout(400)
def test_a_gpu_is_held_by_one_run_at_a_time(prefect_server):
    from prefect.client.orchestration import get_client

    from flows.gpu_limits import holding, limit_name

    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(limit_name(socket.gethostname(), 7), 1)
    held = Event()

    def second() -> None:
        with holding(["cuda:7"]):
            held.set()

    thread = Thread(target=copy_context().run, args=(second,))
    with holding(["cuda:7"]):
        thread.start()
        assert not held.wait(3), "two runs have the same GPU"
    assert held.wait(60)
    thread.join()
    with holding(["cuda:8"]), holding(["cpu"]):
        pass  # no limit was made for these: nobody waits


class Registry:
    """What the server answers about worker types, from the file it reads itself."""

    def read_worker_metadata(self):
        folder = importlib.resources.files("prefect.server.api") / "collections_data/views"
        return json.loads((folder / "aggregate-worker-metadata.json").read_text())


@pytest.mark.parametrize("pool_type", ["kubernetes", "ecs"])
def test_job_templates_fit_the_worker_and_ask_for_gpus(pool_type):
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.utilities.templating import find_placeholders

    template = _job_template(Registry(), pool_type)
    WorkPoolCreate(name="x", type=pool_type, base_job_template=template)
    known = set(template["variables"]["properties"])
    used = {place.name for place in find_placeholders(template["job_configuration"])}
    assert used <= known
    setup = Setup(
        profile="cluster", pool_type=pool_type, gpus=8, git="https://host/repo", commit="0" * 40
    )
    by_queue = {
        deployment["work_pool"]["work_queue_name"]: deployment["work_pool"].get("job_variables", {})
        for deployment in prefect_file(setup)["deployments"]
    }
    assert "8" in json.dumps(by_queue["gpu"])
    assert by_queue["cpu"] == {}
    assert set(by_queue["gpu"]) <= known


def test_kubernetes_jobs_have_gpus_and_shared_memory():
    template = _job_template(Registry(), "kubernetes")
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "{{ image }}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    assert container["resources"]["limits"]["memory"] == "{{ memory_limit }}"
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]


def test_code_comes_from_where_it_is_said():
    git = prefect_file(Setup(git="https://host/repo", commit="a" * 40))
    assert git["pull"][0]["prefect.deployments.steps.git_clone"]["commit_sha"] == "a" * 40
    private = prefect_file(Setup(git="https://host/repo", commit="a" * 40, git_token="github"))
    step = private["pull"][0]["prefect.deployments.steps.git_clone"]
    assert step["access_token"] == "{{ prefect.blocks.secret.github }}"
    bucket = prefect_file(Setup(code="s3://bucket/code/v1"))
    for way in ("push", "pull"):
        ((step, values),) = bucket[way][0].items()
        assert step.startswith(f"prefect_aws.deployments.steps.{way}")
        assert (values["bucket"], values["folder"]) == ("bucket", "code/v1")


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"git": "https://host/repo"}, "git and commit belong together"),
        ({"code": "/some/folder"}, "not an s3:// URL"),
        ({"profile": "cluster"}, "need the code"),
        ({"pool_type": "ecs"}, "needs --profile cluster"),
        ({"git": "https://t0ken@host/repo", "commit": "0" * 40}, "token before the '@'"),
        ({"git_token": "github"}, "git_token is for a repository"),
        ({"store_credentials": True}, "AWS_ACCESS_KEY_ID is not set"),
    ],
)
def test_options_that_do_not_fit_are_refused(setup, words, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(InputError, match=words) as refused:
        next(deploy(Setup(**setup)))
    assert "t0ken" not in str(refused.value)


def test_an_account_of_ssh_is_no_token():
    _check(Setup(git="ssh://git@host/repo", commit="0" * 40))
    _check(Setup(git="git@host:team/repo", commit="0" * 40))


def test_without_a_server_it_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(InputError, match="make ui"):
        next(deploy(Setup()))


def test_merging_goes_key_by_key_and_place_by_place():
    base = {"a": [{"x": 1, "y": 2}, 3], "b": 1}
    assert merged(base, {"a": [{"y": 5}], "c": 7}) == {"a": [{"x": 1, "y": 5}, 3], "b": 1, "c": 7}
