"""Tuning: how long communication will take, and which codec is worth it.

`cost` is the model of a collective and of a training step, which `zcomm plan` also uses. `fit`
finds a machine's numbers from measured collectives, and `codec_costs` those of its codecs;
`default_profile.json` has one machine's. `measure` takes two seconds at most, on the ranks that
will train; `choice` decides for codec="auto", and `check` compares with the first steps.

Imports: engine and below. Start with cost.py, then choice.py.
"""
