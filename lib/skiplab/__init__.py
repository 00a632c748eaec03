"""Why self-attention needs its skip connection: the library behind the notebooks.

Layers, each importing only from those before it: theory, transforms, models, training, companion, studies.
"""

from skiplab import portable

portable.settle()  # before torch computes anything
