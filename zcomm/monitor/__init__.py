"""Monitor: shows what compression does while training runs.

`monitors` has Log, TensorBoard and Callback; `samples` is what they report; `layer_figures` has the
norms and errors of each layer. A monitor sends nothing and changes no bit of the training.

Imports: ddp, zero and below. Start with monitors.py.
"""

from zcomm.monitor.layer_figures import Layer
from zcomm.monitor.monitors import Callback, Log, Monitor, TensorBoard
from zcomm.monitor.samples import Memory, Sample

__all__ = ["Callback", "Layer", "Log", "Memory", "Monitor", "Sample", "TensorBoard"]
