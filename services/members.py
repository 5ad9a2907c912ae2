"""Who is registered in a mesh, for commands that look at one from outside."""

from common.config import MeshConfig
from common.messages import MemberRecord


async def members_of(mesh: MeshConfig) -> list[MemberRecord]:
    """Raises StoreUnavailable."""
    # Only now: importing redis takes longer than most commands, each of which reaches this module.
    from common.store import Store

    store = Store(mesh.redis_url, mesh.namespace)
    await store.connect()
    try:
        return await store.members()
    finally:
        await store.close()
