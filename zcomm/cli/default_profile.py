"""The profile of `zcomm plan` where the user has none.

Written by `python benchmarks/cost_model.py --write-default`.
"""

from __future__ import annotations

from typing import Any

from zcomm.cli.cost import Profile, from_values


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
    "latency_s": 0.0010274459491187637,
    "chunk_s": 0.0008445161426884457,
    "message_s": 3.98385099999965e-05,
    "wire_s": 1.5759808451078866e-09,
    "unhidden": 0.3082337847356291,
    "bytes_per_s": 113785782.97320311,
    "efficiency": 0.9102862637856248,
    "own_step_s": 0.000714006644527574,
    "own_wire_s": 1.0627717897295843e-09,
    "codecs": {
        "none": {
            "encode_s": 7.500734339194182e-10,
            "decode_s": 8.255548467062113e-10,
            "sum_s": 0.0,
            "sum_wire_s": 6.345105205141088e-10,
        },
        "bf16": {
            "encode_s": 5.988721810123998e-10,
            "decode_s": 4.868164066307301e-10,
            "sum_s": 3.868083908731279e-10,
            "sum_wire_s": 1.0140276118786318e-10,
        },
        "fp16": {
            "encode_s": 8.570652035300164e-10,
            "decode_s": 5.918111764535716e-10,
            "sum_s": 0.0,
            "sum_wire_s": 3.612928393958992e-10,
        },
        "int8": {
            "encode_s": 3.697624220699858e-10,
            "decode_s": 4.069490439073675e-10,
            "sum_s": 2.085666570006417e-10,
            "sum_wire_s": 1.0645723538815766e-10,
        },
        "fp8": {
            "encode_s": 8.652725203006639e-10,
            "decode_s": 4.293928129728286e-10,
            "sum_s": 2.7277943792647363e-11,
            "sum_wire_s": 2.3738861223976393e-10,
        },
        "int4": {
            "encode_s": 4.726371793939421e-10,
            "decode_s": 3.998689643291975e-10,
            "sum_s": 2.0534706574037997e-10,
            "sum_wire_s": 1.0513400913736426e-10,
        },
        "lm4": {
            "encode_s": 1.2165002824526816e-09,
            "decode_s": 4.1664695998866463e-10,
            "sum_s": 5.1233671471973e-10,
            "sum_wire_s": 3.8371091026778714e-11,
        },
        "lm3": {
            "encode_s": 8.676900864479364e-10,
            "decode_s": 3.892927161186499e-10,
            "sum_s": 3.090820238638159e-10,
            "sum_wire_s": 9.630537339821998e-11,
        },
        "lm2": {
            "encode_s": 8.492784461799907e-10,
            "decode_s": 4.2457675569762543e-10,
            "sum_s": 2.693738912484811e-10,
            "sum_wire_s": 1.258716603169674e-10,
        },
        "sign": {
            "encode_s": 7.451429404059517e-10,
            "decode_s": 3.751983654320945e-10,
            "sum_s": 2.192592635230639e-10,
            "sum_wire_s": 8.550405522500526e-11,
        },
        "topk:0.01": {
            "encode_s": 1.9446935659028775e-09,
            "decode_s": 3.3590125819715766e-10,
            "sum_s": 3.366470366361618e-10,
            "sum_wire_s": 3.586769076191487e-11,
        },
    },
}
