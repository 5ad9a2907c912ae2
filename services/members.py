"""Who is registered in a mesh, for commands that look at one from outside."""

from common.config import MeshConfig
from common.messages import MemberRecord
from common.store import Store


async def members_of(mesh: MeshConfig) -> list[MemberRecord]:
    """Raises StoreUnavailable."""
    store = Store(mesh.redis_url, mesh.namespace)
    await store.connect()
    try:
        return await store.members()
    finally:
        await store.close()
