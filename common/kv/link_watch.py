"""What one instance knows of the links over which its KV goes and others' comes: which carried none when they
were tried last. Schedulers are told when one fails, and when something gets through again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.ids import InstanceId
from common.messages import KVLinkFailed, KVLinkWorks


@dataclass(slots=True)
class LinkWatch:
    """``suspect_after_s``: a transfer that takes as long counts as one that failed until it is over.
    ``failed``: peers of links that have not worked since they failed. ``has_worked``: another one has, since
    the newest failure."""

    instance_id: InstanceId
    suspect_after_s: float
    tell: Callable[[KVLinkFailed | KVLinkWorks], None]
    failed: set[InstanceId] = field(default_factory=set)
    has_worked: bool = False

    def note_failed(self, sender: InstanceId, receiver: InstanceId) -> None:
        """One of both is this instance."""
        self.failed.add(self._peer(sender, receiver))
        self.has_worked = False
        self.tell(KVLinkFailed(sender, receiver))

    def note_worked(self, sender: InstanceId, receiver: InstanceId) -> None:
        """Something got through. Called for every portion."""
        if not self.failed:
            return
        peer = self._peer(sender, receiver)
        if peer in self.failed or not self.has_worked:
            self.has_worked = True
            self.failed.discard(peer)
            self.tell(KVLinkWorks(sender, receiver))

    def _peer(self, sender: InstanceId, receiver: InstanceId) -> InstanceId:
        return receiver if sender == self.instance_id else sender
