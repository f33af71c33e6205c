"""Refusals of every verb: one paragraph that says what is wrong and what is allowed, exit status 2,
and nothing written."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from plait.plan.search import fits
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import ByteTokenizer
from tests.cli.test_place import JOB as PLACED
from tests.cli.test_place import TOPOLOGY
from tests.cli.test_plan import JOB as OPEN
from tests.support.command import plait
from tests.support.runs import write_job
from tests.support.workloads import heavy_tailed

TIER = "unit"
WEIGHTS = '{"model_type": "gpt2", "n_layer": 9, "n_embd": 32, "n_head": 4, "vocab_size": 257, "n_positions": 16}'
SCHEDULES = {
    "deadlock": "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n",
    "stage": "rank 0: 99999999F0 99999999B0",
    "micro-batch": "rank 0: 0F99999999999 0B99999999999",
    "missing": "rank 0: 0F9 0B0",
    "edge": "edges: 0>99999999999\nrank 0: 0F0 0B0",
    "many": "\n".join(f"rank {number}: {number}F{number} {number}B{number}" for number in range(20000)),
    "passes": "forward only:\nrank 0: " + " ".join(f"0F{number}" for number in range(20_001)),
}
JOBS = {
    "nothing": "",
    "header": "submit,duration,gpus\n",
    "bad": "submit,duration,gpus\n1,-5,1\n2,,1\n",
    "huge": "submit,duration,gpus\n1,5,99999\n",
    "eights": "submit,gpus,duration_s\n0,8,60\n5,16,60\n",
}
ZONES = {"float": "[1.5, 2]", "switch": "[true, 2]", "object": '{"a": 1}', "text": '["3"]', "list": "[[1]]", "one": "3"}
PIPE = {"train.micro_batch_size": 2, "strategy.pp": 2, "strategy.tp": 1}
PIPELINE = " ".join(f"{key}={value}" for key, value in PIPE.items())
DP = f"{PIPELINE} strategy.dp=2 strategy.slices.batch=1"
RAMP = "'train.rampup_batch_size={ start = 2, increment = 2, samples = 20 }' strategy.slices.batch=1 strategy.tp=1"
QUEUE, MACHINE, INIT = "queue replay jobs.csv", "measure machine", "init new.toml --defaults"
REPLICAS = "plan.constraints=[\"'tp = 1', 'pp = 1', 'cp = 1'\"]"
PLACE = "place placed.plan.json --topology topology.conf --out x/t.json"
TYPED = PLACE.replace("topology.conf", "typed.toml")
MESHES = "reshard '(2,4) R S0 R' '(2,4) S0 R R' shape=64,64,8"
TRAIN = {
    "model.hiden=64": "model.hiden .. did you mean 'hidden'",
    "strategy.tp=3": "strategy.tp .. num_heads = 4 .. 1, 2 or 4",
    "strategy.slices.batch=9": "slices .. 9 .. 4",
    "train.precision=fp8": "train.precision .. fp8 .. bf16",
    "data.text=nowhere": "command line: data.text: .. nowhere: no such file or folder",
    "data.text=/dev/zero": "/dev/zero: is a device, no regular file",
    "data.text=pipe": "pipe: is a pipe, no regular file",
    "data.tokenizer=none.json": "command line: data.tokenizer: .. none.json: no such tokenizer file",
    "data.tokenizer=/dev/zero": "/dev/zero: is a device, no tokenizer file",
    "data.eval_fraction=1e-9": "data.eval_fraction .. 0 of 12 documents .. train.eval_every = 0",
    "data.sequence_length=100000 strategy.tp=1": "data.sequence_length: .. are for training .. 100001 tokens",
    "data.sequence_length=-4": "data.sequence_length: -4",
    "model.norm_eps=nan": "model.norm_eps .. nan is not finite",
    "model.num_layers=1e8": "model.num_layers .. 100000000.0 is not allowed .. a whole number",
    "model.num_layers=1000000000000": "model.num_layers .. a whole number of at least 1, at most 2147483647",
    "model.huggingface=/dev/zero": "/dev/zero: cannot be read as a Hugging Face config: It is a device",
    "model.huggingface=empty": "config.json: cannot be read as a Hugging Face config: No such file",
    "model.vocab=3": "command line: model.vocab: 3 is less than the tokenizer's 257 tokens. Use at least 257",
    "train.adam_eps=nan": "train.adam_eps .. nan",
    "train.init_from=none": "train.init_from: .. none: no such folder",
    "train.init_from=latin.toml": "train.init_from: .. latin.toml is a file, and a folder is needed",
    "train.init_from=empty": "empty: holds neither model.safetensors nor",
    "train.init_from=other": "config.json: describes another model: num_layers is 9 there .. Set model.num_layers=9",
    "run.folder=/dev/null": "/dev/null/job/plan.json cannot be written: Not a directory .. run.folder",
    "run.folder=pipe": "plan.json cannot be written: Not a directory .. run.folder",
    "run.name=taken run.folder=.": "taken/logs is a file, and a run needs a folder there",
    "run.device=cuda": "command line: run.device: cuda, but this machine has no GPU",
    "cluster.file=/dev/zero strategy.tp=auto": "/dev/zero: cannot be read: It is a device",
    "cluster.profile=pipe strategy.tp=auto": "pipe: cannot be read as a profile: It is a pipe",
    "cluster.preset=../clusters/h100 strategy.tp=auto": "no cluster '../clusters/h100'",
    "--on moon": "'moon' is no place to run",
    "--json": "--json: is for --dry-run",
    "--no-follow": "--no-follow: is for --on slurm",
    "strategy.schedule=1f1p strategy.tp=1": "unknown schedule '1f1p' .. did you mean '1f1b'",
    "strategy.schedule=/dev/zero strategy.tp=1": "/dev/zero: cannot be read as a schedule: It is a device",
    "strategy.schedule=empty strategy.tp=1": "empty: cannot be read as a schedule: Is a directory",
    "strategy.schedule=latin.toml strategy.tp=1": "strategy.schedule: .. cannot be read as a schedule: 'utf-8'",
    f"{PIPELINE} strategy.pp=3": "2 layers cannot fill 3 stages",
    f"{PIPELINE} strategy.stage_layers=[2,1]": "strategy.stage_layers .. is not a division of 2 layers",
    f"{PIPELINE} strategy.tp=[1,2,1]": "strategy.tp .. 3 numbers for pp = 2",
    f"{DP} strategy.dp=8 train.micro_batch_size=0": "strategy.dp .. dp = 8 exceeds the 4 sequences of a micro-batch",
    f"{PIPELINE} strategy.schedule=slack-1f1b strategy.slack=[1,2]": "has 2 numbers for 1 boundaries of stages",
    f"{PIPELINE} strategy.schedule=deadlock.txt": "deadlock: rank 0 waits at 0B0 .. rank 1 waits at 1F1",
    f"{DP} strategy.dp=1 train.micro_batch_size=1 strategy.schedule=deadlock.txt": "for 2 micro-batches, a step has 4",
    f"{DP} strategy.shard=zero9": "strategy.shard .. 'zero9' is no named sharding .. zero3",
    "strategy.shard=3": 'strategy.shard: 3 .. "ddp", "zero1", "zero2", "zero3" or "fsdp"',
    f"{DP} strategy.shard.params=2": "strategy.shard.params .. 2 does not divide shard.grads = 1",
    f"{DP} strategy.shard.optim=4": "strategy.shard.optim .. 4 does not divide the 2 ranks that",
    f"{PIPELINE} strategy.cp=8": "strategy.cp .. 8 ranks cannot share out 4 heads .. ring",
    f"{PIPELINE} strategy.cp=16 strategy.cp_comm_type=ring": "strategy.cp .. into 32 parts, not 16 tokens",
    f"{PIPELINE} strategy.cp=4 strategy.cp_comm_type.ulysses=2 strategy.cp_comm_type.ring=4": "2 x 4 is not cp = 4",
    f"{RAMP} train.micro_batch_size=1 strategy.dp=4": "train.rampup_batch_size.start .. 2 sequences are not a multiple",
}
REFUSED = {f"train job.toml {words}": says for words, says in TRAIN.items()} | {
    "train /dev/zero": "/dev/zero: cannot be read: It is a device, no regular file",
    "train pipe": "pipe: cannot be read: It is a pipe",
    "train empty": "empty: cannot be read: Is a directory",
    "train latin.toml": "latin.toml: byte 21 is not UTF-8",
    "train twice.toml": "twice.toml: train.steps: not valid TOML: .. line 3 .. Define each name once",
    "data prepare none.txt --out x": "none.txt: no such file or folder",
    "data prepare texts.jsonl": "--out: is missing",
    "data prepare texts.jsonl --out x text_key=body": "have no 'body', but 'text', 'id'",
    "data prepare texts.jsonl --out x tokenizer=none.json": "none.json: no such tokenizer file",
    "data prepare texts.jsonl --out x eval_fraction=2": "eval_fraction",
    "data show corpus --document 20": "--document: 20 is none of the 20 documents of corpus. Use 0 to 19",
    "data show corpus --document -1": "--document: -1 is none of the 20 documents",
    "data prepare corpus --out x": "corpus: is a prepared corpus already; name it as data.text",
    "data show other": "is no prepared corpus and no folder of a run",
    "plan --evaluate": "no job is given",
    "plan open.toml --evaluate": "train.micro_batch_size: is left to the planner",
    "plan open.toml --what-if nics=2": "did you mean 'nic'",
    "plan open.toml --what-if nic=2 --measure 2": "cannot be measured",
    "plan open.toml --measure -1": "--measure: -1 is not allowed. Allowed: 0 or more",
    f"plan open.toml --measure 1 cluster.ranks=4096 train.global_batch_size=4096 {REPLICAS}": (
        "have 4,096 ranks, and this machine has"
    ),
    "plan open.toml --on moon": "'moon' is no place to run",
    "plan open.toml --on slurm": "--on: 'slurm' is not allowed .. Use local, or lab:",
    "plan open.toml cluster.preset=here run.device=cuda": "cuda, but .. no GPU. Name .. cluster.preset=NAME",
    "plan open.toml cluster.preset=here cluster.ranks=1 strategy.dp=2": "strategy.dp=1 .. or cluster.ranks=2",
    "plan open.toml model.preset=llama3-8b": "(family, num_layers, hidden, .. of [model] override the preset",
    "plan open.toml --show megatronn": "did you mean 'megatron'",
    "plan open.toml --show detail": "'details'?). Use details or torchtitan or megatron or deepspeed",
    "plan open.toml --show megatron --json": "--show: prints settings, not JSON",
    "plan open.toml --out plan.txt": "--out: plan.txt would not be taken as a plan .. ends in .json",
    "plan open.toml --out open.toml": "would not be taken as a plan",
    "plan open.toml --out none/plan.json": "--out: there is no folder none. Make it first: mkdir -p none",
    "plan open.toml --draw none/a.svg": "--draw: there is no folder none",
    "plan open.toml --out /proc/plan.json": "cannot be written .. Choose another with --out",
    "plan open.toml --draw /proc/a.svg": "cannot be written .. Choose another with --draw",
    "plan open.toml --cluster h100": "plait plan: --cluster: is a setting, no option. Write cluster.preset=h100",
    "train job.toml --steps=10": "plait train: --steps: is a setting, no option. Write train.steps=10",
    "place job.toml --alpha": "Write place.alpha=VALUE",
    "plan open.toml --evalute": "--evalute: is no option (did you mean '--evaluate'?)",
    "plan open.toml --frob": "--frob: is no option. plait plan --help lists them",
    "train --config job.toml": "--config: is no option .. as they are: plait train [OPTIONS] JOB",
    **{f"plan open.toml --{one} 8": "cluster.ranks=8." for one in ("gpus", "num-gpus", "nproc-per-node", "world-size")},
    "train p.png": "p.png: byte 0 is not UTF-8, so this is no TOML file. Name a text file (TOML)",
    "schedule 1f1b --pp 4": "plait schedule: --pp: is a setting, no option. Write pp=4",
    "plan open.toml --draw a.gif": "ends in .svg, .png, .pdf, .html",
    "plan open.toml --what-if nic=2 --out a.json": "--out: nothing is written",
    "plan a.json b.json --what-if nic=2x": "a comparison of two plans takes no option",
    "plan .": "cannot be read: Is a directory",
    "plan open.toml model.num_layers=1000000": "1,000,000 layers are more than 1,000",
    "plan open.toml cluster.ranks=1000000000000000000": "is not allowed .. at most 2147483647",
    "plan open.toml train.global_batch_size=2000000000": "need more than 4,096 micro-batches of 64",
    "plan open.toml cluster.preset=lab cluster.ranks=8": "8 ranks exceed the 4 of lab",
    "plan open.toml cluster.preset=h1000": "no cluster 'h1000'",
    "plan open.toml plan.constraints=[\"'tp > 64'\"]": "'tp > 64' leaves no strategy for 4 ranks",
    "place placed.plan.json --out x/t.json": "no topology is given",
    "place placed.plan.json --topology none.conf": "none.conf",
    "place placed.toml cluster.ranks=7 --topology topology.conf": "cluster.ranks: 7 are not the 96 ranks",
    "place placed.toml place.rank_table=old.json": "place.rank_table: plait place says anew where ranks lie",
    f"{PLACE} place.spares=1/leaf": "a text such as 2/minipod or 1/row",
    f"{PLACE} place.spares=many": 'place.spares: "many" is not allowed',
    f"{PLACE} place.alpha=2": "a number of at least 0 and at most 1",
    f"{PLACE} place.avoid=a[00-06]": "9 are free: 3 are missing",
    f"{PLACE} place.avoid=zz": "neither a node nor a switch called zz",
    f"{PLACE} place.avoid=a[00-": "place.avoid: 'a[00-': a '[' is never closed",
    f"{PLACE} place.flows=-3": "place.flows: -3 is not allowed",
    f"{PLACE} place.limit=nan": "place.limit: nan is not finite",
    f"{PLACE} place.gpus_per_node=-1": "place.gpus_per_node: -1 is not allowed",
    f"{PLACE} --out .": "'.' is no file",
    f"{PLACE} place.method=quick": 'Allowed: "exact" or "cpsat" or "program"',
    f"{PLACE} place.forbid=0:a": "set place.method=cpsat",
    f"{PLACE} place.forbid=9:a": "'9' is no stage",
    f"{PLACE} --down a00": "Give that one with --repair",
    f"{PLACE} --repair topology.conf": "cannot be read as a rank table",
    f"{PLACE} --draw texts.jsonl/x.svg": "x.svg cannot be written: .. Choose another with --draw",
    f"{PLACE} place.affinity=none.toml": "none.toml",
    f"{PLACE} place.gpu=FOO": "place.gpu: no node has GPUs of type 'FOO'.",
    f"{TYPED} place.gpu=H10": "'H10' (did you mean 'H100'?). Types there are: H100",
    f"{TYPED} place.gpu=1=A100": "no node has GPUs of type 'A100'",
    f"{QUEUE} policy=fivo": "there is no policy 'fivo' (did you mean 'fifo'?)",
    f"{QUEUE} reserve=1200": "'1200' is no NODES@TIME",
    f"{QUEUE} reserve=12@noon": "reserve: 'noon' is no time",
    f"{QUEUE} reserve=3000@9h": "wants 3,000 nodes; the cluster has 2,000",
    f"{QUEUE} reserve=30@1h": "Let it arrive later",
    f"{QUEUE} load=0.9 overlay=2": "both are given",
    f"{QUEUE} load=1e9": "copies have",
    f"{QUEUE} replan=1s": "replan: 1 s is too often",
    f"{QUEUE} reserve=3@9h reserve=2@20h zone=none.json": "1 file for 2 planned jobs",
    f"{QUEUE} reserve=1500@9h reserve=1500@10h": "2 planned jobs want 3,000 nodes at one time",
    f"{QUEUE} nodes=0": "nodes: 0 is not allowed",
    f"{QUEUE} nodes=2000000": "2000000 nodes of 8 GPUs are too many",
    f"{QUEUE} window=0s": "window: '0s' is not allowed. Allowed: more than 0s",
    f"{QUEUE} node=5": "command line: node: unknown key (did you mean 'nodes'?)",
    f"{QUEUE} fast": "'fast' is not a setting",
    f"{QUEUE} --settings none.toml": "none.toml: no such file",
    f"{QUEUE} --settings four.toml": 'four.toml: nodes: "four" is not allowed. Allowed: a whole number',
    f"{QUEUE} late=wait": 'Allowed: "preempt" or "delay"',
    f"{QUEUE} level=1.5": "level: 1.5 is not allowed",
    f"{QUEUE} columns=submit=when": "there is no column 'when'",
    f"{QUEUE} columns=submit=submit_time": "no column is known to hold gpus, duration (or end)",
    f"{QUEUE} format=philly-json": "format: there is no form 'philly-json' (did you mean 'philly'?)",
    f"{QUEUE} reserve=3@9h zone=none.json": "none.json: zone: no JSON list",
    f"{QUEUE} reserve=2@9h zone=pipe": "no regular file",
    **{f"{QUEUE} reserve=2@9h zone={name}.zone": "no JSON list of node numbers" for name in ZONES},
    f"{QUEUE} nodes=8 reserve=2@9h zone=names.zone": "is a name: set topology=FILE, which numbers the names",
    f"{QUEUE} nodes=8 reserve=2@9h zone=names.zone topology=topology.conf": "the topology has no node 'c9'",
    f"{QUEUE} nodes=100 reserve=60@+6h policy=arnold shape=15": "no ROWSxSTAGES",
    f"{QUEUE} nodes=100 reserve=60@+6h policy=arnold shape=7x8": "has 56",
    f"{QUEUE} nodes=100 reserve=60@+6h policy=arnold shape=15x4 zone=z.json": "Leave out shape",
    "lab slurm": "plait lab slurm: was removed. Try a run with plait train JOB --on lab:",
    "place job.toml place.method=mip": "place.method=mip: was removed. Use exact, cpsat or program",
    "export taken --format torchtitan": "--format: was removed. Leave it out",
    "diagnose x.parquet": "diagnose x.parquet: was removed .. benchmarks.published_trace",
    "diagnose empty": "empty holds no timeline .. Name a run's folder",
    "diagnose empty --hang": "empty has no rings .. Name a run's folder",
    "diagnose empty --hang --timeline": "--hang: conflicts with --timeline",
    "diagnose taken other": "Name one run (RUN --against OTHER compares two)",
    "diagnose p.png": "of 1 file, none could be used",
    "check --on slurm": "with: salloc --nodes=2, and give this command again",
    "reserve placed.plan.json --name a --duration 9": "placed.plan.json: not a rank table .. Name a rank_table.json",
    "reserve gone.json --name a --duration 9": "gone.json: No such file .. Name a rank_table.json",
    "calibrate empty": "empty: is no folder of a run",
    "train placed.toml --on kubernetes --dry-run": "kubernetes.image: is missing",
    "topology placed.toml": "no format of a topology is recognised",
    "queue replay nothing.csv": "is empty",
    "queue replay header.csv": "has no job that could be played back: 0 rows",
    "queue replay bad.csv": "2 rows, 1 no duration; 1 negative duration",
    "queue replay huge.csv load=0.9": "no job fits the cluster",
    "queue replay eights.csv nodes=1 gpus_per_node=7": "every job asks for 8 GPUs or more, and the cluster has 7",
    "queue replay pipe": "no regular file",
    "queue fit pipe": "no regular file",
    "queue predict pipes jobs.csv": "is not a regular file",
    f"{INIT} --model lama3-8b": "no preset (did you mean 'llama3-8b'?) and no folder. Use small",
    f"{INIT} --accelerators 8xh1000": "no accelerator is called 'h1000' (did you mean 'h100'?). Write COUNTxKIND",
    f"{INIT} --accelerators 0xh100": "0 accelerators train nothing",
    f"{INIT} --accelerators 12xh100": "12 accelerators do not fill whole hosts of 8 h100. Use at most 8, or a multiple",
    f"{INIT} --accelerators 4096xcpu": "4096 ranks would share",
    f"{INIT} --model llama3-8b --sequence-length 9000": "Use a whole number from 1 to 8192",
    f"{INIT} --sequence-length -1": "Use a whole number from 1 to",
    f"{INIT} --data nowhere": "--data: 'nowhere' is not there. Name files and folders",
    f"{INIT} --data ' , '": "no data are named",
    f"{INIT} --tokenizer nowhere": "--tokenizer: 'nowhere' is no file",
    f"{INIT} --on moon": "'moon' is no place to run. Use here, slurm",
    f"{INIT} --on here:x": "'here:x' is no place to run",
    f"{INIT} --model llama3-70b --accelerators 1xh100": "GiB",
    "init new.toml --example llama": "no example is called 'llama'",
    "init new.toml --example llama3-8b-slurm --model small": "--example: conflicts with --model",
    "init new.toml --model small --data python-stdlib": (
        "--accelerators: is missing .. Add --accelerators, --on, --sequence-length, --tokenizer, or --defaults"
    ),
    "init job.toml --defaults": "is there already",
    "init link.toml --defaults": "is there already",
    "init a/job.toml --defaults": "there is no folder",
    "init job.json --defaults": "ends in .toml",
    f"{MACHINE} seconds=1": "seconds: 1 is not allowed. Allowed: at least 5",
    f"{MACHINE} world_size=0": "world_size: 0 is not allowed",
    f"{MACHINE} world_size=100000": "world_size: 100,000 are more than the ",
    f"{MACHINE} --out /proc/none/profile.json": "/proc/none/profile.json cannot be written",
    f"{MACHINE} --on moon": "--on: 'moon' is no place to run",
    f"{MACHINE} --on lab:2x2@1gbit world_size=3": "world_size: 3 are not the 4 ranks of --on",
    f"{MACHINE} nodes_per_minipod=-1": "nodes_per_minipod: -1 is not allowed",
    f"{MACHINE} absent.toml": "absent.toml: no such file",
    f"{MACHINE} --import absent.log": "absent.log: cannot be read",
    f"{MACHINE} --import absent.log world_size=2": "--import: measures nothing",
    f"{MACHINE} --out texts.jsonl/profile.json": "texts.jsonl/profile.json cannot be written: Not a directory",
    "reshard '2,4 S0 R R' '(2,4) S0 R R' shape=64,64,8": "is not a layout",
    "reshard '(2,4) S0 R' '(2,4) S0 R R' shape=64,64,8": "has 2 dimensions, the shape 64,64,8 has 3",
    MESHES[:-14]: "shape: is missing. Give a text such as 1024,1024,512",
    f"{MESHES} shape=4,x,4": "whole numbers",
    f"{MESHES} shape=4,-1,4": "Give sizes from 0",
    f"{MESHES} dtype=int31": "did you mean 'int32'",
    f"{MESHES} nic=fast": "is not a link rate",
    f"{MESHES} nic=unlimited": "leaves nothing to plan for",
    f"{MESHES} latency=50": "ns, us, ms or s",
    f"{MESHES} way=broadcst": "did you mean 'broadcast'",
    "reshard '(2,4) R S0 R' '(2,4)@4 S0 R R' shape=64,64,8": "Set ranks_per_host=N",
    f"{MESHES} nics_per_host=0": "at least 1",
    f"{MESHES} --draw picture.gif": "ends in .svg, .png, .pdf",
    "schedule 1f2b": "did you mean '1f1b'",
    "schedule 1f1b transfer=1,2": "transfer=1,2: one number is expected, or 3",
    "schedule 1f1b mode=magic": 'Allowed: "buffered" or "rendezvous" or "blocking"',
    "schedule 1f1b mode=blocking": "deadlock: rank 0 waits at",
    "schedule slack-1f1b slack=1,x,1": "whole numbers",
    "schedule 1f1b skip=3>1": "edge 3>1",
    "schedule 1f1b --draw picture.gif": "ends in .svg, .png, .pdf",
    "schedule 1f1b pp=2 --draw texts.jsonl/x.svg": "x.svg cannot be written",
    "schedule 1f1b pp=2000 micro_batches=2000": (
        "4000000 forward passes; at most 20000 are shown. Choose at most 10 micro-batches"
    ),
    "schedule zb-v pp=50000 virtual_stages=2": "Choose fewer stages",
    "schedule passes.txt --ops": "20001 forward passes; at most 20000 are shown. Leave out micro-batches",
    **{f"schedule {name}.txt": f"{name}.txt" for name in ("stage", "micro-batch", "missing", "edge")},
    "schedule many.txt": "0F1 never runs",
    "topology no-such-file": "no-such-file: cannot be read: No such file .. Name a text file",
    "topology topology.conf format=toml": "no format 'toml'",
    "topology topology.conf format=plait": "not valid TOML",
    "topology topology.conf --level pod": "no level 'pod' in the topology",
    "topology topology.conf --as xml": "no form 'xml'",
    "topology topology.conf --out copy": "no ending names no form",
    "topology topology.conf --out /proc/none/copy.toml": "cannot be written",
    "topology topology.conf --draw tree.gif": "ends in .svg, .png, .pdf",
    "topology topology.conf --draw /proc/none/tree.svg": "cannot be written",
    "topology topology.conf --groups topology.conf": "not valid JSON",
    "topology topology.conf states=none": "cannot be read",
    "topology generate minipods=3 nodes=2": "2 nodes in 3 minipods",
    "topology generate minipods=3 nodes=6 busy=1.5": "busy: 1.5",
    "runs gone": "gone",
    "runs --on slurm": "'slurm' has no list of runs",
    "view taken --save none/p.html": "--save: there is no folder none. Make it first",
    "view taken --port x": "plait view: Invalid value for '--port': Input should be a valid integer. plait view",
    "stop x": "x",
    "stop taken --wait -1": "--wait: -1.0 is not allowed",
    "logs x": "x",
    "logs taken --last -3": "'--last': Input should be greater than or equal to 0.",
    "check --nodes 2": "--nodes: 2 is not allowed with --on local",
    "job train.stpes": "did you mean 'train.steps'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that the commands name, and some that are none."""
    folder = tmp_path_factory.mktemp("refused")
    write_job(folder)
    texts = {
        "latin.toml": b"[model]\npreset = 'caf\xe9'\n",
        "p.png": b"\x89PNG\0",
        "twice.toml": "[train]\nsteps = 3\nsteps = 4\n",
        "four.toml": 'nodes = "four"\n',
        "open.toml": OPEN,
        "placed.toml": PLACED,
        "topology.conf": TOPOLOGY,
        "texts.jsonl": "".join(json.dumps({"text": "a document " * 9, "id": number}) + "\n" for number in range(20)),
        "jobs.csv": heavy_tailed(900),
        "names.zone": '["b00", "c9"]',
        "other/config.json": WEIGHTS,
        "other/model.safetensors": "",
        "taken/logs": "",
        **{f"{name}.txt": text for name, text in SCHEDULES.items()},
        **{f"{name}.csv": text for name, text in JOBS.items()},
        **{f"{name}.zone": text for name, text in ZONES.items()},
    }
    for name in ("empty", "other", "taken", "pipes"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in ("pipe", "pipes/model.json"):
        os.mkfifo(folder / name)
    (folder / "link.toml").symlink_to("gone")
    prepare([folder / "texts.jsonl"], ByteTokenizer(), folder / "corpus", CorpusSettings(eval_fraction=0))
    plait("topology", "generate", "minipods=2", "nodes=16", "--out", "typed.toml", folder=folder)
    typed = folder / "typed.toml"
    typed.write_text(typed.read_text().replace("gpus = 8", 'device = "H100", gpus = 8', 1))
    plait("plan", "placed.toml", folder=folder)
    return folder


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_is_one_paragraph_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(fits, "gpus", list)
    before = _written(folder)
    done = plait(*shlex.split(command), folder=folder)
    said = done.stderr.splitlines()[-1:]
    assert done.returncode == 2 and [line[:7] for line in said] == ["plait: "], done.stderr
    assert done.stderr.count("plait: ") == 1 and "Traceback" not in done.stderr
    assert all(part in said[0] for part in REFUSED[command].split(" .. ")), said[0]
    assert _written(folder) == before


def _written(folder: Path) -> dict[str, int]:
    """When each file was written, but for locks; that a folder was tried changes its own time."""
    files = (file for file in folder.iterdir() if file.name[0] != ".")
    return {file.name: 0 if file.is_dir() else file.lstat().st_mtime_ns for file in files}
