//! What operators did, told by the server that they asked.

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::http::Ask;
use dflockd_testkit::millis;
use dflockd_wire::grpc::*;
use serde_json::{Value, json};
use tonic::{Code, Request};

use super::site::{self, Link, Members, Site, ask_http, refused};

const ADMIN: &str = "adm1n-of-the-tests";

fn admin<T>(message: T) -> Request<T> {
    site::admin(ADMIN, message)
}

/// What is kept now.
async fn kept(link: &Link, after: u64, limit: u32) -> Vec<AuditRecord> {
    let request = admin(AuditRequest { after, limit, follow: false });
    let mut stream = link.admin().audit(request).await.unwrap().into_inner();
    let mut records = Vec::new();
    while let Some(record) = soon("the end", stream.message()).await.unwrap() {
        records.push(record);
    }
    records
}

/// Promise 10: who ended what, and why, by every API.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actions_through_all_apis_are_audited() {
    let (site, http) = Site::start_with_http(&["--admin-token", ADMIN]);
    let link = site.link().await;
    let without = link.admin().audit(AuditRequest::default()).await;
    refused(without, Code::PermissionDenied, Reason::NotAdmin);
    assert_eq!(kept(&link, 0, 0).await, []);
    let follow = admin(AuditRequest { follow: true, ..AuditRequest::default() });
    let mut following = link.admin().audit(follow).await.unwrap().into_inner();

    let (holder, victim) = (link.open(0).await, link.open(0).await);
    let held = holder.lock("k").await;
    let mut line = site.server.connect();
    let words = format!("{ADMIN} lock {} by a line", held.fence);
    line.check("force-release", "k", &words, "ok");
    let path = format!("/v1/admin/sessions/{}/end", victim.number);
    let end = Ask::post(&path, &json!({ "reason": "by HTTP" })).admin(ADMIN);
    ask_http(http, &end).empty();
    let again = ForceReleaseRequest {
        key: "k".into(),
        mode: 0,
        fence: held.fence,
        reason: "by gRPC".into(),
    };
    let again = link.admin().force_release(admin(again)).await;
    refused(again, Code::NotFound, Reason::NotHeld);

    let mut told = Vec::new();
    for number in 1..=3 {
        let record = soon("a record", following.message()).await.unwrap().unwrap();
        assert_eq!(record.number, number);
        assert!(record.unix_ms > 0 && record.peer.contains("127.0.0.1"), "{record:?}");
        told.push(record);
    }
    let facts = |record: &AuditRecord| {
        let AuditRecord { api, what, reason, done, .. } = record.clone();
        (api, what, reason, done)
    };
    let fact = |api: &str, what: &str, done| {
        let reason = match api {
            "line" => "by a line",
            "http" => "by HTTP",
            _ => "by gRPC",
        };
        (api.to_owned(), what.to_owned(), reason.to_owned(), Some(done))
    };
    assert_eq!(facts(&told[0]), fact("line", "force-release", true));
    assert_eq!((&told[0].key[..], told[0].fence), (&b"k"[..], held.fence));
    assert_eq!(facts(&told[1]), fact("http", "end-session", true));
    assert_eq!(told[1].session, victim.number);
    assert_eq!(facts(&told[2]), fact("grpc", "force-release", false));
    // Some of them, and all to somebody who asks for what an earlier process has told.
    assert_eq!(kept(&link, 1, 1).await, told[1..2]);
    assert_eq!(kept(&link, 3, 0).await, []);
    assert_eq!(kept(&link, 99, 0).await, told);

    let list = |query: &str, token: &str| {
        let ask = Ask::get(&format!("/v1/admin/audit{query}")).admin(token);
        ask_http(http, &ask)
    };
    list("", "wrong").refused(401, "admin_unauthorized");
    list("?after=x", ADMIN).bad();
    list("?limit=1001", ADMIN).bad();
    let all = list("", ADMIN).ok();
    assert_eq!((all["records"].as_array().unwrap().len(), &all["next"]), (3, &Value::Null));
    let page = list("?after=1&limit=1", ADMIN).ok();
    assert_eq!(page["next"], "2");
    let record = &page["records"][0];
    assert_eq!((&record["number"], &record["what"]), (&json!("2"), &json!("end-session")));
    assert_eq!(record["session"], victim.number.to_string());
    assert_eq!((&record["done"], &record["key"]), (&json!(true), &Value::Null));
    assert_eq!(all["records"][0]["fence"], held.fence.to_string());
    assert!(!all.to_string().contains(ADMIN), "no token is told");

    let output = site.server.output();
    for reason in ["by a line", "by HTTP", "by gRPC"] {
        let line = output.lines().find(|line| line.contains(reason));
        let line = line.unwrap_or_else(|| panic!("{reason} is not in the log: {output}"));
        assert!(line.contains("audit=true") && line.contains("known="), "{line}");
    }
}

/// A change of the cluster that its operator does not wait for is written down as well. Each member tells its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_waits_for_is_audited() {
    let mut members = Members::start(3, &["--admin-token", ADMIN]);
    let leader = members.cluster.leader();
    let stays = members.cluster.others(leader)[0];
    let link = members.link(stays).await;
    let reason = || "the tests".to_owned();
    let transfer = TransferRequest { node: String::new(), reason: reason() };
    link.cluster().transfer(admin(transfer)).await.unwrap();
    for other in members.cluster.others(stays) {
        members.cluster.nodes[other].kill();
    }
    let mut promote =
        admin(PromoteRequest { node: "node-a".into(), reason: reason(), force: false });
    promote.set_timeout(millis(200));
    link.cluster().promote(promote).await.unwrap_err();
    let told = eventually("it is written down", async || {
        Some(kept(&link, 1, 0).await).filter(|records| !records.is_empty())
    })
    .await;
    let [record] = &told[..] else { panic!("{told:?}") };
    assert_eq!((&*record.what, &*record.node, record.done), ("promote", "node-a", Some(false)));
    assert_eq!(kept(&link, 0, 1).await[0].what, "transfer");
}
