"""Where the files that ship beside the code are: recipes, configs, patches and embedded weights.

They stand at the top of the repository and inside the package of an installed wheel; both are served by one rule.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """Directory ``recipes``, ``configs`` or ``patches``, in a wheel or in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def recipe_names() -> list[str]:
    """Recipes by the name a user gives: ``recipe=NAME``."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))
