"""Launch: ranks and hosts on this machine, for the command, the self-test and the benchmarks.

`ranks` starts processes that form a gloo group, and reports how a run failed; `hosts` puts them
into network namespaces with a rate-limited link between them; `launchers` chooses between those and
torchrun's ranks. `machine` and `interfaces` describe this machine.

Imports: transport, report and below. Start with ranks.py.
"""
