//! Somebody on the path between two members: he reads and changes what they send, and knows no secret. And members of
//! the program before, whose frames nothing protects.

use super::*;

/// What the proxy does with the frames that come after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meddle {
    /// Sends one of its own behind the first.
    Inject,
    /// Sends the first twice.
    Repeat,
    /// Leaves the second out.
    Drop,
    /// Flips a bit of the second.
    Flip,
    /// Sends the third before the second.
    Swap,
    /// Sends a frame that the other side sent to the first.
    Reflect,
}

/// The frames that were seen in the other direction.
type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

const INJECTED: &[u8] = b"by somebody on the path";

/// Forwards what comes to `listener`, and meddles with the main lane of the first connection.
async fn proxy(
    listener: TcpListener,
    to: SocketAddr,
    meddle: Option<Meddle>,
    [own, other]: [Seen; 2],
) {
    let mut meddle = meddle;
    loop {
        let (mut near, _) = listener.accept().await.unwrap();
        let hello = read_frame(&mut near).await.unwrap();
        let is_main = hello[16] == 0;
        let deed = if is_main { meddle.take() } else { None };
        let (own, other) = (Arc::clone(&own), Arc::clone(&other));
        tokio::spawn(async move {
            let mut far = TcpStream::connect(to).await.unwrap();
            far.write_all(&hello).await.unwrap();
            let (mut near_in, mut near_out) = near.split();
            let (mut far_in, mut far_out) = far.split();
            let back = tokio::io::copy(&mut far_in, &mut near_out);
            let forth = async {
                // The proof and the verdict.
                for _ in 0..2 {
                    let message = read_frame(&mut near_in).await?;
                    far_out.write_all(&message).await.ok()?;
                }
                let mut number = 0;
                let mut held = None;
                loop {
                    let frame = read_frame(&mut near_in).await?;
                    number += 1;
                    if is_main {
                        own.lock().push(frame.clone());
                    }
                    let injected = [&23_u32.to_le_bytes()[..], INJECTED].concat();
                    let reflected = || other.lock().last().cloned().unwrap();
                    let out = match (deed, number) {
                        (Some(Meddle::Inject), 1) => vec![frame, injected],
                        (Some(Meddle::Repeat), 1) => vec![frame.clone(), frame],
                        (Some(Meddle::Reflect), 1) => vec![frame, reflected()],
                        (Some(Meddle::Drop), 2) => vec![],
                        (Some(Meddle::Flip), 2) => vec![flipped(&frame, 8 * 5)],
                        (Some(Meddle::Swap), 2) => {
                            held = Some(frame);
                            vec![]
                        }
                        (Some(Meddle::Swap), 3) => vec![frame, held.take().unwrap()],
                        _ => vec![frame],
                    };
                    far_out.write_all(&out.concat()).await.ok()?;
                }
                #[expect(unreachable_code, reason = "the type of the block")]
                Some(())
            };
            tokio::select! { _ = back => (), _ = forth => () }
        });
    }
}

/// A length and as many bytes.
async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 4];
    from.read_exact(&mut bytes).await.ok()?;
    let length = u32::from_le_bytes(bytes[..4].try_into().unwrap());
    bytes.resize(4 + usize::try_from(length).unwrap(), 0);
    from.read_exact(&mut bytes[4..]).await.ok()?;
    Some(bytes)
}

/// GUARANTEES 48: without TLS somebody on the path can cut a connection between members, and do nothing else to it.
#[tokio::test]
async fn who_meddles_with_frames_only_cuts_the_connection() {
    for meddle in
        [Meddle::Inject, Meddle::Repeat, Meddle::Drop, Meddle::Flip, Meddle::Swap, Meddle::Reflect]
    {
        let log = Log::new();
        let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
        let (there, back): (Seen, Seen) = <_>::default();
        let (to_b, address_of_b) = listen().await;
        let (to_a, address_of_a) = listen().await;
        let seen = [Arc::clone(&there), Arc::clone(&back)];
        let honest = tokio::spawn(proxy(to_a, a.transport.local_addr(), None, [back, there]));
        let hostile = tokio::spawn(proxy(to_b, b.transport.local_addr(), Some(meddle), seen));
        b.transport.set_peers(vec![peer("a", &address_of_a)]);
        b.until("connections", |seen| seen.reachable == 2).await;
        b.send(&a, b"for a");
        a.until_received(b"for a").await;
        a.transport.set_peers(vec![peer("b", &address_of_b)]);
        a.until("connections", |seen| seen.reachable == 2).await;

        for frame in [&b"1"[..], b"2", b"3"] {
            a.send(&b, frame);
        }
        b.until(&format!("{meddle:?} is noticed"), |seen| seen.bad == 1 && seen.lost == 1).await;
        log.until(&["refused a frame", "node=\"a\""]).await;
        let came = b.get(|seen| seen.main.clone());
        assert_eq!(came, [(1, Bytes::from_static(b"1"))], "{meddle:?}: only what came before it");
        // A new connection, with which nobody meddles.
        a.until("it is made again", |seen| seen.reachable == 3).await;
        a.send(&b, b"4");
        b.until_received(b"4").await;
        b.get(|seen| assert_eq!((seen.main.len(), seen.bad), (2, 1), "{meddle:?}"));
        assert!(b.get(|seen| seen.main.iter().all(|(_, frame)| frame != INJECTED)));
        a.get(|seen| assert_eq!(seen.bad, 0));
        honest.abort();
        hostile.abort();
    }
}

/// GUARANTEES 48: what members say to each other without TLS can not be read on the path.
#[tokio::test]
async fn frames_can_not_be_read_on_the_path() {
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    let (listener, address) = listen().await;
    let (there, back): (Seen, Seen) = <_>::default();
    let to = b.transport.local_addr();
    let seen = [Arc::clone(&there), back];
    let proxy = tokio::spawn(proxy(listener, to, None, seen));
    a.transport.set_peers(vec![peer("b", &address)]);
    a.send(&b, b"the value of a key");
    b.until_received(b"the value of a key").await;
    let frames = there.lock().clone();
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].len(), 4 + 18 + TAG_BYTES);
    assert!(!frames[0].windows(5).any(|part| part == b"value"));
    proxy.abort();
}

fn before(parts: &mut (TransportConfig, Identity)) {
    parts.0.version_max = Version::Plain;
}

/// GUARANTEES 42: members of the program before, which seals nothing, and of this one talk to each other, until the
/// cluster leaves that program behind; then nobody speaks as before.
#[tokio::test]
async fn members_of_the_program_before_are_met_until_the_cluster_leaves_it() {
    let log = Log::new();
    let old = Node::with("a", secrets(&[1]), before).await;
    let new = Node::new("b", secrets(&[1])).await;
    old.dial(&[&new]);
    new.dial(&[&old]);
    for (node, other) in [(&old, &new), (&new, &old)] {
        node.until("connections", |seen| seen.reachable == 2).await;
        node.send(other, b"hello");
        other.until_received(b"hello").await;
    }
    // The old one is started again as the new program; what there was of connections was not protected.
    let address = old.address();
    old.transport.stop();
    old.transport.stopped().await;
    let upgraded = Node::with("a", secrets(&[1]), |(config, _)| config.listen = address).await;
    upgraded.dial(&[&new]);
    upgraded.until("connections", |seen| seen.reachable == 2).await;
    new.until("connections", |seen| seen.reachable == 4).await;
    upgraded.send(&new, b"sealed");
    new.until_received(b"sealed").await;

    new.transport.seal();
    upgraded.transport.seal();
    upgraded.send(&new, b"still the same connection");
    new.until_received(b"still the same connection").await;
    let ends = |node: &Node| node.get(|seen| (seen.unreachable, seen.lost));
    assert_eq!(ends(&upgraded), (0, 0), "sealed connections stay");

    // One of the program before comes too late, on either side.
    let late = Node::with("c", secrets(&[1]), before).await;
    let other = Node::new("d", secrets(&[1])).await;
    other.transport.seal();
    check_refused(
        &late,
        &other,
        &log,
        &["it speaks version 2 of the peer protocol, this node version 1 with it"],
        &["it speaks version 1 of the peer protocol, this node version 2 with it"],
    )
    .await;
    check_refused(&other, &late, &log, &["the cluster has left version 1 behind"], &[]).await;
}

/// GUARANTEES 48: connections without seals end when the cluster leaves the version that needs them.
#[tokio::test]
async fn open_connections_end_when_frames_must_be_sealed() {
    let log = Log::new();
    let old = Node::with("a", secrets(&[1]), before).await;
    let new = Node::new("b", secrets(&[1])).await;
    old.dial(&[&new]);
    new.dial(&[&old]);
    for node in [&old, &new] {
        node.until("connections", |seen| seen.reachable == 2).await;
    }
    new.transport.seal();
    old.until("its streams are gone", |seen| seen.lost == 2 && seen.unreachable >= 2).await;
    log.until(&["reconnecting to peer", "every frame is sealed from now on"]).await;
    log.until(&["cannot connect", "the cluster has left version 1 behind"]).await;
    new.send(&old, b"must not arrive");
    old.send(&new, b"must not arrive");
    old.until("attempts", |seen| seen.unreachable >= 6).await;
    old.assert_nothing_received();
    new.assert_nothing_received();

    // With TLS there is one version, and nothing to end.
    let authority = Authority::new();
    let a = Node::new("a", authority.credentials("a")).await;
    let b = Node::new("b", authority.credentials("b")).await;
    a.dial(&[&b]);
    a.until("connections", |seen| seen.reachable == 2).await;
    a.transport.seal();
    b.transport.seal();
    a.send(&b, b"over TLS");
    b.until_received(b"over TLS").await;
    a.get(|seen| assert_eq!((seen.reachable, seen.unreachable), (2, 0)));
}

/// GUARANTEES 48: who is told on the path that a peer is of the program before does not believe it once the cluster has
/// left that behind: not even a hello goes out in the old form.
#[tokio::test]
async fn nobody_is_talked_down() {
    let log = Log::new();
    let (listener, address) = listen().await;
    let a = Node::new("a", secrets(&[1])).await;
    a.transport.seal();
    a.transport.set_peers(vec![peer("b", &address)]);
    for _ in 0..6 {
        let mut fresh = Fresh::plain(listener.accept().await.unwrap().0);
        let hello = get(&mut fresh).await;
        assert_eq!(handshake::version_of(&hello), Some(Version::Sealed));
        fresh.write(&handshake::challenge(Version::Plain, PLAIN, [0; 32])).await.unwrap();
        until_closed(&mut fresh.stream).await;
    }
    log.until(&["cannot connect", "an older server, or somebody on the path"]).await;
    // Nor is a dialer let in that knows the secret and asks for it.
    let asked = raw_dial_with(Version::Plain, &a, &secrets(&[1]), &identity("b"), Lane::Main).await;
    let reason = asked.err().unwrap().reason;
    assert!(reason.contains("it speaks version 2 of the peer protocol"), "{reason}");
    // What was agreed with one version does not hold for the other: the number is under the proof.
    let open = Node::new("c", secrets(&[1])).await;
    let known = [secret(1)];
    let keys = Keys { secrets: &known, binding: None };
    let (ours, share) = (identity("b"), share(Version::Sealed));
    let mut dialer = Dialer::new(keys, &ours, "c", Lane::Main, Version::Sealed, share.nonce);
    let mut changed = dialer.hello().to_vec();
    changed[9] = 1;
    let mut fresh = Fresh::plain(TcpStream::connect(open.transport.local_addr()).await.unwrap());
    fresh.write(&changed).await.unwrap();
    let mut challenge = get(&mut fresh).await;
    assert_eq!(challenge[9], 1);
    challenge[9] = 2;
    let proof = dialer.prove(&challenge).unwrap();
    fresh.write(&proof).await.unwrap();
    until_closed(&mut fresh.stream).await;
    log.until(&["refused a peer", "b has another shared secret"]).await;
}
