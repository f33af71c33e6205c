"""Traces in the forms in which others published theirs, made up: a few rows of each."""

from __future__ import annotations

PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "user": "u1",
        "submitted_time": "2017-10-09 07:01:55",
        "attempts": [
            {"start_time": "2017-10-09 07:02:00", "end_time": "2017-10-09 07:03:00",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
            {"start_time": "2017-10-09 07:10:00", "end_time": "2017-10-09 07:12:00",
             "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
        ],
    },
    {"status": "Killed", "vc": "ee9e8c", "jobid": "never", "user": "u2", "submitted_time": "2017-10-09 06:00:00",
     "attempts": []},
    {"status": "Running", "vc": "x", "jobid": "open", "user": "u2", "submitted_time": "2017-10-09 06:00:00",
     "attempts": [{"start_time": "2017-10-09 07:02:00", "end_time": "None", "detail": [{"ip": "m", "gpus": ["g"]}]}]},
]  # fmt: skip


HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
7,ua,vc1,8,32,1,COMPLETED,2020-04-01 00:00:10,2020-04-01 00:00:20,2020-04-01 00:01:20,60,10
8,ub,vc2,0,4,1,COMPLETED,2020-04-01 00:00:11,2020-04-01 00:00:20,2020-04-01 00:01:20,60,9
9,ua,vc1,16,64,2,FAILED,2020-04-01 00:00:05,2020-04-01 00:00:05,2020-04-01 00:00:35,30,0
"""


ACME = """job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,\
end_time,fail_time,stop_time,duration,queue,gpu_time
dlc1,u,2,16,128,800,200,Pretrain,COMPLETED,2023-03-01 00:00:00+00:00,2023-03-01 00:01:00+00:00,\
2023-03-01 01:01:00+00:00,,,3600,60,57600
dlc2,v,1,1,8,100,10,Evaluation,CANCELLED,2023-03-01 00:30:00+08:00,,,,,,,
"""


SPOT = """job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
j0,o1,A100,12,8,4,100,3600,HP
j1,o2,A10,6,0.5,1,50,60,Spot
"""


PAI = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
a,worker,4.0,Terminated,100.0,400.0,600.0,29.3,50.0,T4
b,ps,1.0,Failed,50.0,80.0,600.0,29.3,800.0,V100
c,worker,1.0,Terminated,60.0,90.0,600.0,29.3,25.0,MISC
d,worker,1.0,Running,70.0,,600.0,29.3,100.0,MISC
e,worker,1.0,Terminated,75.0,80.0,600.0,29.3,,P100
f,worker,1.0,Waiting,,,600.0,29.3,100.0,
"""
