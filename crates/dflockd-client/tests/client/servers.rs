//! Several servers that share the keys.

use dflockd_client::{Client, shard};
use dflockd_testkit::eventually::tasks::soon;

use super::server::{LONG, Process, crowd};

#[tokio::test(flavor = "multi_thread")]
async fn keys_go_to_their_servers() {
    let servers = [Process::start::<&str>(&[]), Process::start::<&str>(&[])];
    let addresses = servers.each_ref().map(|server| server.address.to_string());
    let client = Client::builder().servers(addresses).connect().await.unwrap();
    let each = [servers[0].client().await, servers[1].client().await];
    assert_eq!(client.session(), None);
    let keys = ["my-resource", "my-key", "bench", "deploy-job", "worker-pool", "a"];
    assert_eq!(keys.map(|key| shard(key.as_bytes(), 2)), [0, 1, 1, 0, 0, 1]);
    let mut guards = Vec::new();
    for key in keys {
        let (home, away) = if shard(key.as_bytes(), 2) == 0 { (0, 1) } else { (1, 0) };
        let guard = client.lock(key).lease(LONG).try_acquire().await.unwrap().unwrap();
        assert_eq!(crowd(&each[home], key).await, (1, 0), "{key}");
        assert_eq!(crowd(&each[away], key).await, (0, 0), "{key}");
        assert!(each[home].lock(key).try_acquire().await.unwrap().is_none());
        guards.push(guard);
    }
    let mut sorted = keys.to_vec();
    sorted.sort_unstable();
    let listed = client.keys(b"", 100, None).await.unwrap();
    let names: Vec<&str> = listed.iter().map(|key| key["key"].as_str().unwrap()).collect();
    assert_eq!(names, sorted);
    assert_eq!(client.keys(b"", 2, None).await.unwrap().len(), 2);
    let after = client.keys(b"", 100, Some(b"bench")).await.unwrap();
    assert_eq!(after.len(), 4);
    assert_eq!(client.stats().await.unwrap().len(), 2);
    client.ping().await.unwrap();
    for guard in guards {
        guard.release().await.unwrap();
    }

    // Signals and watches are heard from both.
    let mut signals = client.listen("n.*", None).await.unwrap();
    let mut watch = client.watch("k.*").await.unwrap();
    for (number, server) in each.iter().enumerate() {
        assert_eq!(server.signal("n.x", b"hi").await, Ok(1));
        let signal = soon("a signal", signals.next()).await.unwrap();
        assert_eq!(signal.channel, "n.x");
        server.counter(format!("k.{number}")).add(1).await.unwrap();
        let change = soon("a change", watch.next()).await.unwrap();
        assert_eq!(change.key, format!("k.{number}").into_bytes());
    }

    // One of them is gone: the keys of the other are as good as before.
    let [first, second] = servers;
    drop(second);
    assert!(client.lock("deploy-job").try_acquire().await.unwrap().is_some());
    assert!(client.ping().await.is_err());
    drop(first);
}

#[tokio::test]
async fn a_session_belongs_to_one_server() {
    let builder = Client::builder().servers(["127.0.0.1:1", "127.0.0.1:2"]);
    assert!(builder.attach("0".repeat(32)).connect().await.is_err());
    let nobody: [&str; 0] = [];
    assert!(Client::builder().servers(nobody).connect().await.is_err());
    assert!(Client::builder().name("two words").connect().await.is_err());
}
