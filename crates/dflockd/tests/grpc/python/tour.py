"""Every service of dflockd.v1 through grpcio, with code made from the .proto files.

    tour.py BINARY      starts the server and exits with 1 if anything is not as it should be
"""

import queue
import socket
import subprocess
import sys
import threading
import time

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from dflockd.v1 import admin_pb2, admin_pb2_grpc, barriers_pb2, barriers_pb2_grpc, cluster_pb2, cluster_pb2_grpc
from dflockd.v1 import common_pb2, counters_pb2, counters_pb2_grpc, elections_pb2, elections_pb2_grpc, kv_pb2
from dflockd.v1 import kv_pb2_grpc, lists_pb2, lists_pb2_grpc, locks_pb2, locks_pb2_grpc, sessions_pb2
from dflockd.v1 import sessions_pb2_grpc, signals_pb2, signals_pb2_grpc, watch_pb2, watch_pb2_grpc

TOKEN = "token-of-the-tour"
ADMIN = "admin-of-the-tour"
LIMIT = 30


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Signed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor,
             grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the token to every call."""

    def _sign(self, call, details, request):
        metadata = list(details.metadata or []) + [("authorization", f"Bearer {TOKEN}")]
        return call(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = _sign
    intercept_stream_unary = intercept_stream_stream = _sign


class Stream:
    """What a stream tells, read by a thread, so that nothing can wait for ever."""

    def __init__(self, call):
        self.call, self.messages = call, queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for message in self.call:
                self.messages.put(message)
        except grpc.RpcError as error:
            self.messages.put(error)

    def next(self):
        message = self.messages.get(timeout=LIMIT)
        if isinstance(message, Exception):
            raise message
        return message


def refused(code, reason, call, *args, **options):
    try:
        call(*args, timeout=LIMIT, **options)
    except grpc.RpcError as error:
        assert error.code() == code, error
        status = rpc_status.from_call(error)
        assert status is not None and len(status.details) == 1, error
        info = common_pb2.ErrorInfo()
        assert status.details[0].Unpack(info), status
        assert common_pb2.Reason.Name(info.reason) == reason, info
        return info
    raise AssertionError(f"not refused: {reason}")


def sessions(channel):
    stub = sessions_pb2_grpc.SessionsStub(channel)
    opened = stub.Open(sessions_pb2.OpenRequest(ttl_ms=10000, client_name="python", metadata={"language": "python"}))
    assert opened.ttl_ms == 10000 and opened.number > 0, opened
    attached = stub.Attach(sessions_pb2.AttachRequest(session=opened.session))
    assert attached.number == opened.number, attached
    kept = stub.KeepAlive(sessions_pb2.KeepAliveRequest(session=opened.session))
    assert kept.valid_for_ms == 10000 and kept.renewed == 0, kept
    beats = [sessions_pb2.KeepAliveRequest(session=opened.session)] * 3
    answers = list(stub.KeepAliveStream(iter(beats), timeout=LIMIT))
    assert [answer.valid_for_ms for answer in answers] == [10000] * 3, answers
    cancel = sessions_pb2.CancelRequest(session=opened.session, request_id=99)
    assert not stub.Cancel(cancel).waited, "nobody asked that"
    other = stub.Open(sessions_pb2.OpenRequest())
    stub.Close(sessions_pb2.CloseRequest(session=other.session))
    refused(grpc.StatusCode.NOT_FOUND, "REASON_SESSION_GONE", stub.KeepAlive,
            sessions_pb2.KeepAliveRequest(session=other.session))
    return opened


def locks(channel, session):
    stub = locks_pb2_grpc.LocksStub(channel)
    request = locks_pb2.AcquireRequest(session=session, request_id=1, key=b"k", wait_ms=1000)
    grant = stub.Acquire(request).grant
    assert grant.valid_for_ms == 10000 and int(grant.token[:16], 16) == grant.fence, grant
    assert stub.Acquire(request).grant == grant, "once"
    tried = stub.TryAcquire(locks_pb2.TryAcquireRequest(session=session, key=b"k"))
    assert not tried.HasField("grant"), tried
    renewed = stub.Renew(locks_pb2.RenewRequest(session=session, key=b"k", token=grant.token, lease_ms=5000))
    assert renewed.fence == grant.fence and renewed.valid_for_ms == 5000, renewed
    described = stub.Describe(locks_pb2.DescribeRequest(key=b"k"))
    assert [holder.fence for holder in described.locks[0].holders] == [grant.fence], described
    assert described.locks[0].holders[0].client == "python", described
    listed = stub.List(locks_pb2.ListRequest(prefix=b"k"))
    assert [lock.key for lock in listed.locks] == [b"k"] and not listed.next, listed
    queued = stub.Enqueue(locks_pb2.EnqueueRequest(session=session, key=b"k"))
    assert not queued.HasField("grant"), queued
    stub.Release(locks_pb2.ReleaseRequest(session=session, key=b"k", token=grant.token))
    waited = stub.Wait(locks_pb2.WaitRequest(session=session, key=b"k", wait_ms=5000)).grant
    assert waited.fence > grant.fence, waited
    refused(grpc.StatusCode.NOT_FOUND, "REASON_NOT_HELD", stub.Release,
            locks_pb2.ReleaseRequest(session=session, key=b"k", token=grant.token))
    refused(grpc.StatusCode.INVALID_ARGUMENT, "REASON_BAD_REQUEST", stub.Acquire,
            locks_pb2.AcquireRequest(session=session, key=b"a b"))
    # A deadline takes the place in the queue with it, and is called so whoever sees it first.
    waiting = locks_pb2.AcquireRequest(session=session, key=b"k", wait_ms=60000)
    for _ in range(30):
        try:
            stub.Acquire(waiting, timeout=0.03)
            raise AssertionError("granted twice")
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
    end = time.monotonic() + LIMIT
    while stub.Describe(locks_pb2.DescribeRequest(key=b"k")).locks[0].waiters_total:
        assert time.monotonic() < end, "a place is left behind"
        time.sleep(0.01)
    return waited


def elections(channel, session):
    stub = elections_pb2_grpc.ElectionsStub(channel)
    observed = Stream(stub.Observe(elections_pb2.ObserveRequest(key=b"e")))
    assert not observed.next().HasField("leader")
    led = stub.Campaign(elections_pb2.CampaignRequest(session=session, key=b"e")).grant
    told = observed.next()
    assert told.event == elections_pb2.LEADER_EVENT_ELECTED and told.leader.fence == led.fence, told
    stub.Proclaim(elections_pb2.ProclaimRequest(session=session, key=b"e", token=led.token, value=b"here"))
    assert observed.next().leader.value == b"here"
    stub.Resign(elections_pb2.ResignRequest(session=session, key=b"e", token=led.token))
    told = observed.next()
    assert told.event == elections_pb2.LEADER_EVENT_RESIGNED and not told.HasField("leader"), told
    observed.call.cancel()


def values(channel, session):
    watched = Stream(watch_pb2_grpc.WatchStub(channel).Watch(watch_pb2.WatchRequest(patterns=[b"v.>"])))
    assert not watched.next().changes
    counters = counters_pb2_grpc.CountersStub(channel)
    add = counters_pb2.AddCounterRequest(session=session, request_id=2, key=b"v.c", delta=3)
    assert counters.Add(add).value == 3 and counters.Add(add).value == 3, "once"
    assert counters.Set(counters_pb2.SetCounterRequest(key=b"v.c", value=-9)).value == -9
    assert counters.Get(counters_pb2.GetCounterRequest(key=b"v.c")).value == -9
    kv = kv_pb2_grpc.KvStub(channel)
    revision = kv.Set(kv_pb2.SetRequest(key=b"v.k", value=b"\xff\x00")).revision
    entry = kv.Get(kv_pb2.GetRequest(key=b"v.k")).entry
    assert entry.value == b"\xff\x00" and entry.revision == revision, entry
    swap = kv_pb2.CompareAndSetRequest(key=b"v.k", revision=revision, new_value=b"new")
    assert kv.CompareAndSet(swap).written and not kv.CompareAndSet(swap).written
    kv.Delete(kv_pb2.DeleteRequest(key=b"v.k"))
    assert not kv.Get(kv_pb2.GetRequest(key=b"v.k")).HasField("entry")
    kinds = []
    while len(kinds) < 5:
        kinds += [watch_pb2.ChangeKind.Name(change.kind)[12:] for change in watched.next().changes]
    assert kinds == ["INCR", "CSET", "KSET", "KCAS", "KDEL"], kinds
    watched.call.cancel()
    refused_watch = Stream(watch_pb2_grpc.WatchStub(channel).Watch(
        watch_pb2.WatchRequest(patterns=[b"v.>"], after_revision=1)))
    try:
        while True:
            refused_watch.next()
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.OUT_OF_RANGE, error
    lists = lists_pb2_grpc.ListsStub(channel)
    for item in [b"a", b"b", b"c"]:
        lists.Push(lists_pb2.PushRequest(key=b"q", end=lists_pb2.LIST_END_RIGHT, item=item))
    assert lists.Length(lists_pb2.LengthRequest(key=b"q")).length == 3
    assert list(lists.Range(lists_pb2.RangeRequest(key=b"q", start=0, stop=-1)).items) == [b"a", b"b", b"c"]
    assert lists.Pop(lists_pb2.PopRequest(key=b"q", wait_ms=0)).item == b"a"
    assert not lists.Pop(lists_pb2.PopRequest(key=b"none", wait_ms=10)).HasField("item")
    barrier = barriers_pb2.BarrierWaitRequest(session=session, key=b"b", count=1)
    assert barriers_pb2_grpc.BarriersStub(channel).Wait(barrier).passed


def signals(channel):
    stub = signals_pb2_grpc.SignalsStub(channel)
    wish = signals_pb2.SubscribeRequest(add=[signals_pb2.Subscription(pattern=b"a.*")])
    heard = Stream(stub.Subscribe(iter([wish])))
    assert heard.next().WhichOneof("what") == "applied"
    sent = stub.Publish(signals_pb2.PublishRequest(channel=b"a.b", payload=b"hello"))
    assert sent.receivers == 1, sent
    signal = heard.next().signal
    assert (signal.channel, signal.payload) == (b"a.b", b"hello"), signal
    heard.call.cancel()


def cluster(channel):
    stub = cluster_pb2_grpc.ClusterStub(channel)
    health = Stream(stub.Health(cluster_pb2.HealthRequest()))
    now = health.next()
    assert now.ready and now.role == "memory", now
    health.call.cancel()
    refused(grpc.StatusCode.FAILED_PRECONDITION, "REASON_NO_CLUSTER", stub.Members, cluster_pb2.MembersRequest())
    refused(grpc.StatusCode.PERMISSION_DENIED, "REASON_NOT_ADMIN", stub.Add, cluster_pb2.AddRequest())
    admin = [("x-dflockd-admin", ADMIN)]
    for call, request in [(stub.Promote, cluster_pb2.PromoteRequest(node="n", reason="r")),
                          (stub.Remove, cluster_pb2.RemoveRequest(node="n", reason="r")),
                          (stub.Transfer, cluster_pb2.TransferRequest(reason="r")),
                          (stub.Snapshot, cluster_pb2.SnapshotRequest()),
                          (stub.Policy, cluster_pb2.PolicyRequest()),
                          (stub.SetPolicy, cluster_pb2.SetPolicyRequest(
                              set=cluster_pb2.Policy(max_locks=7), reason="r")),
                          (stub.Address, cluster_pb2.AddressRequest(node="n", peer_addr="h:1", reason="r")),
                          (stub.Finalize, cluster_pb2.FinalizeRequest(reason="r")),
                          (stub.Drain, cluster_pb2.DrainRequest(reason="r"))]:
        refused(grpc.StatusCode.FAILED_PRECONDITION, "REASON_NO_CLUSTER", call, request, metadata=admin)


def operator(channel, opened, grant):
    stub = admin_pb2_grpc.AdminStub(channel)
    admin = [("x-dflockd-admin", ADMIN)]
    release = admin_pb2.ForceReleaseRequest(key=b"k", fence=grant.fence, reason="the tour")
    refused(grpc.StatusCode.PERMISSION_DENIED, "REASON_NOT_ADMIN", stub.ForceRelease, release)
    stub.ForceRelease(release, metadata=admin)
    listed = stub.ListSessions(admin_pb2.ListSessionsRequest(), metadata=admin)
    mine = [it for it in listed.sessions if it.number == opened.number]
    assert mine[0].client == "python" and mine[0].metadata["language"] == "python", listed
    followed = Stream(stub.Audit(admin_pb2.AuditRequest(follow=True), metadata=admin))
    first = followed.next()
    assert (first.number, first.what, first.api, first.done) == (1, "force-release", "grpc", True), first
    assert (first.key, first.fence, first.reason) == (b"k", grant.fence, "the tour"), first
    stub.EndSession(admin_pb2.EndSessionRequest(number=opened.number, reason="the tour"), metadata=admin)
    assert followed.next().session == opened.number
    followed.call.cancel()
    kept = list(stub.Audit(admin_pb2.AuditRequest(after=1), metadata=admin, timeout=LIMIT))
    assert [it.what for it in kept] == ["end-session"], kept
    refused(grpc.StatusCode.NOT_FOUND, "REASON_SESSION_GONE",
            sessions_pb2_grpc.SessionsStub(channel).KeepAlive,
            sessions_pb2.KeepAliveRequest(session=opened.session))


def reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    names = ["Admin", "Barriers", "Cluster", "Counters", "Elections", "Kv", "Lists", "Locks", "Sessions", "Signals",
             "Watch"]
    missing = {f"dflockd.v1.{name}" for name in names} | {"grpc.health.v1.Health"}
    assert not missing - services, missing - services
    pool = descriptor_pool.DescriptorPool(database)
    acquire = pool.FindServiceByName("dflockd.v1.Locks").FindMethodByName("Acquire")
    assert acquire.input_type.full_name == "dflockd.v1.AcquireRequest"
    # What the server tells is what the files say.
    told = {field.name: field.number for field in acquire.input_type.fields}
    known = {field.name: field.number for field in locks_pb2.AcquireRequest.DESCRIPTOR.fields}
    assert told == known, told


def health(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ["", "dflockd.v1.Locks"]:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer


def tour(address):
    plain = grpc.insecure_channel(address)
    grpc.channel_ready_future(plain).result(timeout=LIMIT)
    health(plain)
    refused(grpc.StatusCode.UNAUTHENTICATED, "REASON_UNAUTHENTICATED",
            sessions_pb2_grpc.SessionsStub(plain).Open, sessions_pb2.OpenRequest())
    channel = grpc.intercept_channel(plain, Signed())
    reflection(channel)
    opened = sessions(channel)
    grant = locks(channel, opened.session)
    elections(channel, opened.session)
    values(channel, opened.session)
    signals(channel)
    cluster(channel)
    operator(channel, opened, grant)
    channel.close()


def main():
    port = free_port()
    server = subprocess.Popen(
        [sys.argv[1], "--port", "0", "--grpc-port", str(port), "--auth-token", TOKEN, "--admin-token", ADMIN],
        stderr=subprocess.PIPE)
    log = []
    threading.Thread(target=lambda: log.extend(iter(server.stderr.readline, b"")), daemon=True).start()
    try:
        tour(f"127.0.0.1:{port}")
    except BaseException:
        sys.stderr.write(b"".join(log[-20:]).decode(errors="replace"))
        raise
    finally:
        server.terminate()
        server.wait(timeout=LIMIT)
    assert server.returncode == 0, server.returncode
    print("all services answered as they should")


main()
