"""A stand-in for the hub: a cache that holds repositories, of which nothing has to be downloaded."""

from huggingface_hub import constants


def publish(cache, repository, **revisions):
    """Lay revisions of a repository into a cache, each by the function that writes it into a folder."""
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    for number, (name, write) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        (root / "refs" / name).write_text(commit)
        (root / "snapshots" / commit).mkdir(parents=True)
        write(root / "snapshots" / commit)


def move(cache, repository, branch, to):
    """Let a branch of a repository in a cache be the commit that another one is.

    Returns:
        The commit that it was before.
    """
    refs = cache / f"models--{repository.replace('/', '--')}" / "refs"
    before = (refs / branch).read_text()
    (refs / branch).write_text((refs / to).read_text())
    return before


def use_cache(monkeypatch, cache):
    """Let everybody look in `cache` for what is on the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
