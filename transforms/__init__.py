"""Gradient transformations for Optax chains."""

if __name__ != "jaxaccel.transforms":  # pragma: no cover
    raise ImportError(
        f"this folder was imported as {__name__!r}; "
        "write `import jaxaccel.transforms` instead"
    )
