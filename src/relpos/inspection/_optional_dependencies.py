"""The optional dependencies, matplotlib and jinja2, or an error that names the extra "plots"."""

try:
    from jinja2 import Environment, StrictUndefined
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Colormap, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise ImportError(
        f'relpos.inspection needs {error.name or "matplotlib and jinja2"}: pip install "relpos[plots]"',
        name=error.name,
    ) from None

__all__ = [
    "Axes",
    "Colormap",
    "Environment",
    "Figure",
    "FigureCanvasAgg",
    "FuncFormatter",
    "ListedColormap",
    "MaxNLocator",
    "StrictUndefined",
    "rc_context",
]
