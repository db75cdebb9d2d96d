"""The profile that `zcomm plan` uses by default.

Written by `python benchmarks/cost_model.py --write-default`.
"""

from __future__ import annotations

from typing import Any

from zcomm.planning.cost import Profile, from_values


def profile() -> Profile:
    return from_values(VALUES)


VALUES: dict[str, Any] = {
    "about": {
        "machine": "x86_64",
        "cpu": "AMD EPYC",
        "cores": 2,
        "isa": "avx2",
        "torch": "2.13.0+cpu",
        "zcomm": "0.1.0",
        "ranks": 2,
        "link": "1gbit",
    },
    "cores": 2,
    "latency_s": 0.0009170040432046712,
    "chunk_s": 0.0011687342353445176,
    "message_s": 7.324533000000244e-05,
    "wire_s": 1.4848451658727526e-09,
    "unhidden": 6.661338147750939e-17,
    "bytes_per_s": 113889937.6170772,
    "efficiency": 0.9111195009366176,
    "own_step_s": 0.0013237534141249557,
    "own_wire_s": 1.297002777457233e-09,
    "codecs": {
        "none": {
            "encode_s": 5.79792019950176e-10,
            "decode_s": 6.593437185120621e-10,
            "sum_s": 8.583926625060911e-11,
            "sum_wire_s": 4.019279492561978e-10,
        },
        "bf16": {
            "encode_s": 5.862312302262751e-10,
            "decode_s": 4.845991177782061e-10,
            "sum_s": 2.8659057765834106e-10,
            "sum_wire_s": 1.454062460715111e-10,
        },
        "fp16": {
            "encode_s": 6.177997557976767e-10,
            "decode_s": 4.714136164762905e-10,
            "sum_s": 3.358173322753899e-10,
            "sum_wire_s": 1.3592767883485735e-10,
        },
        "int8": {
            "encode_s": 5.388212237500412e-10,
            "decode_s": 4.4688797107284017e-10,
            "sum_s": 3.737363821199047e-10,
            "sum_wire_s": 9.53264238379159e-11,
        },
        "fp8": {
            "encode_s": 9.48235510944695e-10,
            "decode_s": 5.573091502175664e-10,
            "sum_s": 1.012783121256966e-10,
            "sum_wire_s": 2.430448516055339e-10,
        },
        "int4": {
            "encode_s": 4.319057472779164e-10,
            "decode_s": 4.468679384861396e-10,
            "sum_s": 3.4203435222979195e-10,
            "sum_wire_s": 8.614921276350884e-11,
        },
        "lm4": {
            "encode_s": 1.0082950585577066e-09,
            "decode_s": 4.2028713148623e-10,
            "sum_s": 3.671646181535593e-10,
            "sum_wire_s": 1.1040305822329621e-10,
        },
        "lm3": {
            "encode_s": 8.609256779701369e-10,
            "decode_s": 4.489507654525937e-10,
            "sum_s": 3.157882774718068e-10,
            "sum_wire_s": 1.0877895112448854e-10,
        },
        "lm2": {
            "encode_s": 1.2054643672154697e-09,
            "decode_s": 6.14493365913571e-10,
            "sum_s": 5.830793417538338e-10,
            "sum_wire_s": 8.84609226148303e-11,
        },
        "sign": {
            "encode_s": 8.195066500404913e-10,
            "decode_s": 4.034233086480654e-10,
            "sum_s": 5.268487868193006e-10,
            "sum_wire_s": 4.83465351086565e-12,
        },
        "topk:0.01": {
            "encode_s": 1.944884302218508e-09,
            "decode_s": 3.9645862287551736e-10,
            "sum_s": 4.4705009139001106e-10,
            "sum_wire_s": 7.1897522657682345e-12,
        },
    },
}
