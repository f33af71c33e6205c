"""Controllers of a small Kubernetes: Indexed Jobs, JobSets, and what their deletion takes with
it."""

from __future__ import annotations

import copy
import secrets
import time

from tests.support.kubernetes.objects import Object, Store, stamp
from tests.support.kubernetes.server import delete_pod

INDEX = "batch.kubernetes.io/job-completion-index"
OVER = ("Succeeded", "Failed")


TRACKING = "batch.kubernetes.io/job-tracking"
"""By which a Job counts its pods before they are gone
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#job-tracking-with-finalizers)."""
BACKOFF, LONGEST = 10.0, 360.0
"""Seconds until a failed pod is made again, twice as many after each that fails, and at most
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-backoff-failure-policy)."""


def control(store: Store, tick: float = 1.0) -> None:
    """One round of the Job controller and the garbage collector. tick: seconds for one of the
    controller's."""
    for job in store.of("Job"):
        _control(store, job, tick)
    owners = {one["metadata"]["uid"] for kind in ("Job", "JobSet") for one in store.of(kind)}
    _release(store)
    for kind in ("Pod", "ConfigMap", "Secret", "Service", "Job"):
        for one in store.of(kind):
            references = one["metadata"].get("ownerReferences", [])
            if references and not any(owner["uid"] in owners for owner in references):
                if kind == "Pod":
                    if "deletionTimestamp" not in one["metadata"]:
                        delete_pod(store, one, None)
                else:
                    store.remove(one)


def _release(store: Store) -> None:
    """Take the finalizer of pods that were counted, and of those whose Job is over
    (``canRemoveFinalizer`` in pkg/controller/job/job_controller.go): not of one that was deleted
    and has not failed."""
    going = [job for job in store.of("Job") if "deletionTimestamp" not in job["metadata"]]
    goes_on = {job["metadata"]["uid"] for job in going if not job.get("status", {}).get("conditions")}
    for pod in store.of("Pod"):
        owners = {one["uid"] for one in pod["metadata"].get("ownerReferences", [])}
        if pod["metadata"].get("finalizers") and (pod["status"]["phase"] in OVER or not owners & goes_on):
            store.release(pod)


def pods_of(store: Store, job: Object) -> list[Object]:
    uid = job["metadata"]["uid"]
    return [pod for pod in store.of("Pod") if pod["metadata"]["ownerReferences"][0]["uid"] == uid]


def _control(store: Store, job: Object, tick: float) -> None:
    pods, status, spec = pods_of(store, job), job.setdefault("status", {}), job["spec"]
    if "deletionTimestamp" in job["metadata"]:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                delete_pod(store, pod, None)
        if not pods:
            store.remove(job)
        return
    if status.get("conditions"):
        return
    if spec.get("suspend"):
        _suspend(store, pods)
        return
    status.setdefault("startTime", stamp())
    done = {pod["metadata"]["labels"][INDEX] for pod in pods if pod["status"]["phase"] == "Succeeded"}
    failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
    never = [pod for pod in failed if _exit(pod) in spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]]
    counted = _count(store, job, pods, failed)
    if never:
        _finish(store, job, pods, "Failed", "PodFailurePolicy")
    elif "0" in done or len(done) == spec["completions"]:
        _finish(store, job, pods, "Complete", "SuccessPolicy")
    elif status.get("failed", 0) > spec["backoffLimit"]:
        _finish(store, job, pods, "Failed", "BackoffLimitExceeded")
    elif time.monotonic() >= counted["wait"] * tick + counted["at"]:
        # podReplacementPolicy: Failed: one that is about to end is still there
        there = done | {pod["metadata"]["labels"][INDEX] for pod in pods if pod["status"]["phase"] not in OVER}
        for index in map(str, range(spec["completions"])):
            if index not in there:
                _create(store, job, index)


def _suspend(store: Store, pods: list[Object]) -> None:
    """Pods go, as they do when they are deleted; when it has started stays known
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#suspending-a-job)."""
    for pod in pods:
        if pod["status"]["phase"] not in OVER and "deletionTimestamp" not in pod["metadata"]:
            delete_pod(store, pod, None)


def _count(store: Store, job: Object, pods: list[Object], failed: list[Object]) -> Object:
    """Failures: pods that have failed, and those that are gone without having succeeded. What is
    ignored counts not against the limit, but makes the next wait longer all the same
    (pkg/controller/job/backoff_utils.go)."""
    nothing: Object = {"alive": {}, "failed": set(), "failures": 0, "wait": 0.0, "at": 0.0}
    counted = store.counted.setdefault(job["metadata"]["uid"], nothing)
    gone = counted["alive"].keys() - {pod["metadata"]["uid"] for pod in pods}
    new = {pod["metadata"]["uid"]: _disrupted(pod) for pod in failed if pod["metadata"]["uid"] not in counted["failed"]}
    new |= {uid: counted["alive"][uid] for uid in gone if uid not in counted["failed"]}
    counted["alive"] = {pod["metadata"]["uid"]: _disrupted(pod) for pod in pods if pod["status"]["phase"] not in OVER}
    if not new:
        return counted
    counted["failed"] |= new.keys()
    counted["failures"] += len(new)
    counted["wait"] = min(LONGEST, BACKOFF * 2.0 ** (counted["failures"] - 1))
    counted["at"] = time.monotonic()
    ignored = _ignores(job["spec"])
    job["status"]["failed"] = job["status"].get("failed", 0) + sum(not (ignored and lost) for lost in new.values())
    return counted


def _disrupted(pod: Object) -> bool:
    return any(one["type"] == "DisruptionTarget" for one in pod["status"].get("conditions", []))


def _ignores(spec: Object) -> bool:
    return any(rule["action"] == "Ignore" for rule in spec["podFailurePolicy"]["rules"])


def _exit(pod: Object) -> int | None:
    found = pod["status"].get("containerStatuses", [{}])[0].get("state", {})
    return found.get("terminated", {}).get("exitCode")


def _finish(store: Store, job: Object, pods: list[Object], how: str, reason: str) -> None:
    job["status"]["conditions"] = [{"type": how, "status": "True", "reason": reason}]
    store.update(job)
    for pod in pods:
        if pod["status"]["phase"] not in OVER and "deletionTimestamp" not in pod["metadata"]:
            delete_pod(store, pod, None)


def _create(store: Store, job: Object, index: str) -> None:
    name, template = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
    metadata = template["metadata"]
    metadata["labels"] = {**metadata["labels"], INDEX: index, "batch.kubernetes.io/job-name": name}
    metadata["finalizers"] = [TRACKING]
    metadata["name"] = f"{name}-{index}-{secrets.token_hex(3)}"
    metadata["ownerReferences"] = [{"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}]
    spec = {**template["spec"], "hostname": f"{name}-{index}"}
    store.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
    )


def job_sets(store: Store) -> None:
    """One round of the JobSet controller."""
    for one in store.of("JobSet"):
        name, spec, status = one["metadata"]["name"], one["spec"], one.setdefault("status", {"restarts": 0})
        jobs = [
            job for job in store.of("Job") if job["metadata"]["ownerReferences"][0]["uid"] == one["metadata"]["uid"]
        ]
        if "deletionTimestamp" in one["metadata"]:
            for job in jobs:
                job["metadata"].setdefault("deletionTimestamp", stamp())
            if not jobs:
                store.remove(one)
        elif status.get("conditions"):
            continue
        elif any(bool(job["spec"].get("suspend")) != bool(spec.get("suspend")) for job in jobs):
            for job in jobs:
                job["spec"]["suspend"] = bool(spec.get("suspend"))
                store.update(job)
        elif spec.get("suspend"):
            continue
        elif not jobs:
            _create_child(store, one, name, spec)
        elif "deletionTimestamp" not in jobs[0]["metadata"] and (ended := jobs[0].get("status", {}).get("conditions")):
            again = (
                ended[0]["reason"] != "PodFailurePolicy" and status["restarts"] < spec["failurePolicy"]["maxRestarts"]
            )
            if ended[0]["type"] == "Failed" and again:
                status["restarts"] += 1
                jobs[0]["metadata"]["deletionTimestamp"] = stamp()
                store.update(jobs[0])
            else:
                how = "Completed" if ended[0]["type"] == "Complete" else "Failed"
                status["conditions"] = [{"type": how, "status": "True", "reason": "Done"}]
            store.update(one)


def _create_child(store: Store, owner: Object, name: str, spec: Object) -> None:
    template = copy.deepcopy(spec["replicatedJobs"][0]["template"]["spec"])
    template["template"]["spec"]["subdomain"] = spec["network"]["subdomain"]
    metadata = {"name": f"{name}-{spec['replicatedJobs'][0]['name']}-0",
                "ownerReferences": [{"kind": "JobSet", "name": name, "uid": owner["metadata"]["uid"]}]}  # fmt: skip
    store.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template})
