"""Launch: ranks and hosts on this machine, for the command, the self-test and the benchmarks.

`ranks` starts processes that form a gloo group; `hosts` puts them into network namespaces with a
shaped link in between; `places` chooses between the two.

Imports: transport, report and below. Start with ranks.py.
"""
