"""Where on the bus each message goes. Subjects hold ids only, never user text."""

from dataclasses import dataclass

from common.ids import GatewayId, InstanceId


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one mesh; ``namespace`` keeps several meshes on one NATS apart."""

    namespace: str

    def submit(self) -> str:
        """SubmitRequest and PlaceMoved, to the scheduler (queue group: any scheduler answers)."""
        return f"lamella.{self.namespace}.scheduler.submit"

    def scheduler_events(self) -> str:
        """LoadReport and RequestEnded, to every scheduler; predictors listen, too."""
        return f"lamella.{self.namespace}.scheduler.events"

    def scheduler_bookings(self) -> str:
        """BookingsChanged, to every scheduler."""
        return f"lamella.{self.namespace}.scheduler.bookings"

    def scheduler_calls(self, scheduler_id: str) -> str:
        """ReadBookings, to one scheduler."""
        return f"lamella.{self.namespace}.scheduler.{scheduler_id}.call"

    def leader(self) -> str:
        """LeaderAnnounced, to schedulers, instances and launchers."""
        return f"lamella.{self.namespace}.leader"

    def scaling(self) -> str:
        """DesiredCounts, to whoever starts and ends workers."""
        return f"lamella.{self.namespace}.scaling"

    def admin_scale(self) -> str:
        """ScaleWish, to whoever starts and ends processes."""
        return f"lamella.{self.namespace}.admin.scale"

    def admin_drain(self) -> str:
        """DrainWish, likewise."""
        return f"lamella.{self.namespace}.admin.drain"

    def admin_news(self) -> str:
        """WishNews, to every gateway."""
        return f"lamella.{self.namespace}.admin.news"

    def predict(self) -> str:
        """PredictLength (queue group: any predictor answers)."""
        return f"lamella.{self.namespace}.predictor.predict"

    def instance_calls(self, instance_id: InstanceId) -> str:
        """PrefillTask, DecodeTask, PullKV, FlipRole and AreYouThere, to one instance."""
        return f"lamella.{self.namespace}.instance.{instance_id}.call"

    def instance_events(self, instance_id: InstanceId) -> str:
        """CancelRequest, LengthPredicted and AttentionDraining, to one instance."""
        return f"lamella.{self.namespace}.instance.{instance_id}.events"

    def attention_calls(self, worker_id: str) -> str:
        """AttentionCall, to one attention worker."""
        return f"lamella.{self.namespace}.attention.{worker_id}.call"

    def gateway_events(self, gateway_id: GatewayId) -> str:
        """TokenBatch, SequenceFailed, SequenceMoved and WorkDone, to one gateway."""
        return f"lamella.{self.namespace}.gateway.{gateway_id}.events"

    def link_traffic(self) -> str:
        """LinkTraffic, to whoever watches the mesh."""
        return f"lamella.{self.namespace}.link-traffic"

    def trace_calls(self, service_id: str) -> str:
        """ReadClock, StartTrace and ReadTrace, to one service of any kind."""
        return f"lamella.{self.namespace}.trace.{service_id}.call"

    def everyone(self) -> str:
        """InstanceGone, AttentionGone, GatewayGone and SchedulerGone, to gateways, instances and attention
        workers."""
        return f"lamella.{self.namespace}.everyone"
