//! One queue for all APIs.

use dflockd_testkit::eventually::tasks::soon;

use super::site::Site;

/// Promise 5: gRPC and the line protocol take turns in the order they came; fences grow over both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_come_first_served_over_both_apis() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let holder = link.open(0).await;
    let held = holder.lock("k").await;
    let (done, mut order) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..10_u32 {
        let done = done.clone();
        if number % 2 == 0 {
            let session = link.open(0).await;
            tokio::spawn(async move {
                let grant = session.lock("k").await;
                done.send((number, grant.fence)).unwrap();
                session.unlock("k", &grant).await.unwrap();
            });
        } else {
            let mut client = site.server.connect();
            std::thread::spawn(move || {
                client.send("l\nk\n20\n");
                let line = client.line();
                let token = line.split(' ').nth(1).unwrap().to_owned();
                done.send((number, u64::from_str_radix(&token[..16], 16).unwrap())).unwrap();
                client.send(format!("r\nk\n{token}\n"));
                assert_eq!(client.line(), "ok");
            });
        }
        link.wait_for_waiters("k", number + 1).await;
    }
    holder.unlock("k", &held).await.unwrap();
    let mut last = held.fence;
    for expected in 0..10 {
        let (number, fence) = soon("the next one", order.recv()).await.unwrap();
        assert_eq!(number, expected, "promise 5");
        assert!(fence > last, "promise 3");
        last = fence;
    }
}

/// What is set through one API is seen through the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_are_the_same_over_both_apis() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let mut line = site.server.connect();
    line.send("kset\nv\nfrom the line\n");
    assert_eq!(line.line(), "ok");
    let get = dflockd_wire::grpc::GetRequest { key: "v".into() };
    let entry = link.kv().get(get).await.unwrap().into_inner().entry.unwrap();
    assert_eq!(&entry.value[..], b"from the line");
    let add =
        dflockd_wire::grpc::AddCounterRequest { key: "c".into(), delta: 41, ..Default::default() };
    link.counters().add(add).await.unwrap();
    line.send("incr\nc\n1\n");
    assert_eq!(line.line(), "ok 42");
}
