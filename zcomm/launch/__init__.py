"""Launch: ranks and hosts on this machine, for the command, the self-test and the benchmarks.

`ranks` starts processes that form a gloo group, and reports how a run failed; `hosts` puts them
into network namespaces with a rate-limited link between them; `tasks` says whether torchrun, mpirun
or srun started this process, and `launchers` joins those ranks, or starts some. `machine` and
`interfaces` describe this machine.

Imports: transport, report and below. Start with ranks.py.
"""
