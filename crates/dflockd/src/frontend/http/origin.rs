//! Where a request may come from when no token tells clients from strangers.
//!
//! A server on the loopback address is within reach of every web page that is open on that machine. A page can send
//! simple requests to any port (the browser only keeps the answers from it), and with a name of its own that resolves
//! to the loopback address it can read the answers as well. So without a token the server looks at what browsers say of
//! a request and a page cannot change: the `Host` it was sent to, the `Origin` it comes from, `Sec-Fetch-Site`, and the
//! `Content-Type`, which a page must ask for before it may be JSON. Other clients send nothing that is refused here.
//!
//! With a token none of this is needed: no page has it, and no browser adds it by itself.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use http_body::Body as _;

use super::cors::Cors;
use super::error::ApiError;
use crate::config::Config;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// The address of this machine that a connection came in at, where the server listens on all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived(pub(crate) IpAddr);

/// The names that this server answers to besides those of the loopback address.
pub(crate) struct Hosts {
    all: bool,
    /// In lower case; one that begins with a dot stands for all names that end with it.
    names: Vec<String>,
}

impl Hosts {
    pub(crate) fn new(config: &Config) -> Self {
        let mut names = config.http_allowed_hosts.clone();
        let bound = config.http_address().filter(|_| !config.http_listens_everywhere());
        let told = config.http_advertise_addr.as_ref().map(|address| address.host.as_str());
        let own = bound.map(|(host, _)| host).into_iter().chain(told);
        names.extend(own.map(|host| bare(host).to_ascii_lowercase()));
        Self { all: names.iter().any(|name| name == "*"), names }
    }

    fn have(&self, host: &str, arrived: Option<Arrived>) -> bool {
        if self.all || host.eq_ignore_ascii_case("localhost") {
            return true;
        }
        if let Ok(address) = host.parse::<IpAddr>() {
            let address = address.to_canonical();
            let is_ours = arrived.is_some_and(|Arrived(own)| own.to_canonical() == address);
            let mut known = self.names.iter().filter_map(|name| name.parse::<IpAddr>().ok());
            return address.is_loopback()
                || is_ours
                || known.any(|known| known.to_canonical() == address);
        }
        let host = host.to_ascii_lowercase();
        self.names.iter().any(|name| match name.strip_prefix('.') {
            Some(domain) => {
                let below = host.strip_suffix(domain).and_then(|rest| rest.strip_suffix('.'));
                below.is_some_and(|name| !name.is_empty())
            }
            None => *name == host,
        })
    }
}

/// That a request names the host it is for at most once, which holds for every request: a proxy in front of the server
/// could go by the other one.
pub(crate) fn check_single_host(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get_all(HOST).iter().nth(1) {
        Some(_) => Err(ApiError::bad_request("more than one Host header")),
        None => Ok(()),
    }
}

/// Refuses a request that the page of somebody else may have made.
pub(crate) fn check(request: &Request, hosts: &Hosts, cors: &Cors) -> Result<(), ApiError> {
    let headers = request.headers();
    let host = check_host(request, hosts)?;
    check_page(headers, &host, cors)?;
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    check_type(headers, !request.body().is_end_stream())
}

/// The host that the request is for, if it is one of this server's.
fn check_host<'a>(request: &'a Request, hosts: &Hosts) -> Result<Authority<'a>, ApiError> {
    // HTTP/2, and requests as proxies send them, have it in the URI; both must be right, whichever is gone by.
    let uri = request.uri().authority().map(|authority| authority.as_str());
    let header = request.headers().get(HOST);
    let header = header.map(|host| host.to_str().unwrap_or_default());
    let arrived = request.extensions().get::<Arrived>().copied();
    let mut found = None;
    for text in [header, uri].into_iter().flatten() {
        let host = Authority::parse(text).filter(|host| hosts.have(host.name, arrived));
        found = Some(host.ok_or_else(ApiError::host_not_allowed)?);
    }
    found.ok_or_else(|| ApiError::bad_request("a Host header is required"))
}

/// That no page of another origin asks, unless it may.
fn check_page(headers: &HeaderMap, host: &Authority<'_>, cors: &Cors) -> Result<(), ApiError> {
    let mut origins = headers.get_all(ORIGIN).iter();
    let (origin, another) = (origins.next(), origins.next());
    let may = match origin {
        Some(origin) => another.is_none() && (cors.admits(origin) || is_same(origin, host)),
        None => !is_foreign(headers) || cors.admits_all(),
    };
    if may { Ok(()) } else { Err(ApiError::origin_not_allowed()) }
}

/// Whether a page of somebody else asks although there is no `Origin`, as for images and frames: they change nothing,
/// but a stream that is opened so takes signals from those who share them.
fn is_foreign(headers: &HeaderMap) -> bool {
    let Some(site) = headers.get(SEC_FETCH_SITE) else { return false };
    // A link that somebody follows from another server of the same machine or domain is fine.
    let is_followed = headers.get(SEC_FETCH_DEST).is_none_or(|what| what == "document");
    site == "cross-site" || site == "same-site" && !is_followed
}

/// Whether a page comes from this very server: same name, same port.
fn is_same(origin: &HeaderValue, host: &Authority<'_>) -> bool {
    let Some((scheme, origin)) = origin.to_str().ok().and_then(|text| text.split_once("://"))
    else {
        // `null`, which every page can be made to send.
        return false;
    };
    let Some(origin) = Authority::parse(origin) else { return false };
    let usual = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return false,
    };
    // Not the scheme: TLS may end in a proxy before the server.
    origin.name.eq_ignore_ascii_case(host.name)
        && origin.port.unwrap_or(usual) == host.port.unwrap_or(usual)
}

/// That a body says to be JSON, which pages of other origins must ask for before.
fn check_type(headers: &HeaderMap, has_body: bool) -> Result<(), ApiError> {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let is_json = match (types.next(), types.next()) {
        (Some(one), None) => is_json(one),
        (Some(_), Some(_)) => false,
        // What programs send that never needed it.
        (None, _) => !has_body || !headers.contains_key(ORIGIN),
    };
    if is_json { Ok(()) } else { Err(ApiError::unsupported_media_type()) }
}

fn is_json(kind: &HeaderValue) -> bool {
    let kind = kind.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

/// The host and the port in `Host`, `:authority` and `Origin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Authority<'a> {
    /// Without the brackets that IPv6 has, and without the dot that a full name may end with.
    name: &'a str,
    port: Option<u16>,
}

impl<'a> Authority<'a> {
    /// None if it is malformed; names are not checked beyond what could hide another one.
    fn parse(text: &'a str) -> Option<Self> {
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (name, port) = rest.split_once(']')?;
                name.parse::<std::net::Ipv6Addr>().ok()?;
                (name, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
            }
            None => match text.split_once(':') {
                Some((name, port)) => (name, Some(port)),
                None => (text, None),
            },
        };
        let port = match port.filter(|port| !port.is_empty()) {
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                Some(digits.parse().ok()?)
            }
            Some(_) => return None,
            None => None,
        };
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        let name = name.strip_suffix('.').unwrap_or(name);
        (!name.is_empty() && name.bytes().all(is_fine)).then_some(Self { name, port })
    }
}

/// An address without the brackets that IPv6 may have around it.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn hosts(names: &[&str]) -> Hosts {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        Hosts { all: names.iter().any(|name| name == "*"), names }
    }

    /// The status of the refusal, 200 if there is none.
    fn status(method: &str, uri: &str, headers: &[(&str, &str)], names: &[&str]) -> u16 {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = if method == "POST" { Body::from("{}") } else { Body::empty() };
        let request = request.body(body).unwrap();
        let cors = Cors::new(&["https://page.example".to_owned()]);
        let single = check_single_host(request.headers());
        let checked = single.and_then(|()| check(&request, &hosts(names), &cors));
        checked.map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn authorities() {
        for (text, name, port) in [
            ("localhost", "localhost", None),
            ("localhost:6389", "localhost", Some(6389)),
            ("localhost.", "localhost", None),
            ("localhost.:80", "localhost", Some(80)),
            ("127.0.0.1:", "127.0.0.1", None),
            ("[::1]", "::1", None),
            ("[::1]:6389", "::1", Some(6389)),
        ] {
            assert_eq!(Authority::parse(text), Some(Authority { name, port }), "{text}");
        }
        for wrong in [
            "",
            ".",
            ":80",
            "[::1",
            "[::1]80",
            "[localhost]",
            "::1",
            "a:b",
            "a:99999",
            "a:+1",
            "a:80:80",
            "a@b",
            "a b",
            "a,b",
            "a/b",
            "a\\b",
            "a#b",
            "\u{e4}",
            "[]",
            "[::1].evil",
        ] {
            assert_eq!(Authority::parse(wrong), None, "{wrong:?}");
        }
    }

    /// GUARANTEES 48: who counts as a client of a server without a token.
    #[test]
    fn hosts_of_this_machine() {
        let host = |host: &str, names: &[&str]| status("GET", "/", &[("host", host)], names);
        for own in
            ["localhost", "LOCALHOST:1", "127.0.0.1:6389", "127.9.9.9", "[::1]:6389", "[::1]"]
        {
            assert_eq!(host(own, &[]), 200, "{own}");
        }
        let mapped = "[::ffff:127.0.0.1]:6389";
        assert_eq!(host(mapped, &[]), 200);
        for foreign in [
            "evil.example",
            "localhost.evil.example",
            "evil.localhost",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "[fe80::1]",
            "localhost:80@evil.example",
            "",
            "128.0.0.1",
        ] {
            assert_eq!(host(foreign, &[]), 421, "{foreign}");
        }
        let named = ["locks.example", ".svc.cluster.local", "10.0.0.1", "fe80::1"];
        for own in [
            "locks.example:443",
            "Locks.Example",
            "a.svc.cluster.local",
            "a.b.svc.cluster.local:1",
            "10.0.0.1:6389",
            "[fe80::1]",
            "[fe80:0::1]:1",
            "localhost",
        ] {
            assert_eq!(host(own, &named), 200, "{own}");
        }
        for foreign in
            ["a.locks.example", "svc.cluster.local", ".svc.cluster.local", "xsvc.cluster.local"]
        {
            assert_eq!(host(foreign, &named), 421, "{foreign}");
        }
        assert_eq!(host("evil.example", &["*"]), 200);
        assert_eq!(status("GET", "/", &[], &[]), 400);
        assert_eq!(
            status("GET", "/", &[("host", "localhost"), ("host", "localhost")], &["*"]),
            400
        );
        // The URI counts as well, and one right name does not make up for a wrong one.
        assert_eq!(status("GET", "http://localhost:1/", &[], &[]), 200);
        assert_eq!(status("GET", "http://evil.example/", &[("host", "localhost")], &[]), 421);
        assert_eq!(status("GET", "http://localhost/", &[("host", "evil.example")], &[]), 421);
    }

    #[test]
    fn an_address_that_a_connection_came_in_at() {
        let come = |host: &str| {
            let own = Arrived("10.0.0.7".parse().unwrap());
            hosts(&[]).have(host, Some(own))
        };
        assert!(come("10.0.0.7") && come("::ffff:10.0.0.7") && come("localhost"));
        assert!(!come("10.0.0.8") && !come("evil.example"));
    }

    #[test]
    fn pages_of_other_origins() {
        let post = |host: &str, headers: &[(&str, &str)]| {
            let json = [("content-type", "application/json"), ("host", host)];
            status("POST", "/", &[&json[..], headers].concat(), &["locks.example"])
        };
        for (host, own) in [
            ("localhost:6389", "http://localhost:6389"),
            ("LOCALHOST:6389", "http://localhost:6389"),
            ("[::1]:6389", "http://[::1]:6389"),
            ("locks.example", "https://locks.example"),
            ("locks.example:443", "https://locks.example"),
            ("locks.example", "http://locks.example:80"),
            ("locks.example:80", "http://locks.example"),
            ("localhost", "https://page.example"),
            ("localhost", "HTTPS://PAGE.example"),
        ] {
            assert_eq!(post(host, &[("origin", own)]), 200, "{own} to {host}");
        }
        for (host, foreign) in [
            ("localhost:6389", "http://evil.example"),
            ("localhost:6389", "http://localhost:3000"),
            ("localhost:6389", "http://localhost"),
            ("localhost:6389", "http://127.0.0.1:6389"),
            ("locks.example", "http://locks.example:81"),
            ("localhost:6389", "null"),
            ("localhost:6389", ""),
            ("localhost:6389", "localhost:6389"),
            ("localhost:6389", "file://localhost:6389"),
            ("localhost:6389", "http://localhost:6389.evil.example"),
            ("localhost:6389", "http://localhost:6389@evil.example"),
            ("localhost:6389", "chrome-extension://localhost:6389"),
        ] {
            assert_eq!(post(host, &[("origin", foreign)]), 403, "{foreign} to {host}");
        }
        let same = ("origin", "http://localhost:6389");
        assert_eq!(post("localhost:6389", &[same, same]), 403, "two");
        for (site, code) in
            [("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)]
        {
            assert_eq!(post("localhost", &[("sec-fetch-site", site)]), code, "{site}");
        }
        for (what, code) in [("document", 200), ("image", 403), ("iframe", 403), ("empty", 403)] {
            let headers = [("sec-fetch-site", "same-site"), ("sec-fetch-dest", what)];
            assert_eq!(post("localhost", &headers), code, "{what}");
        }
        // A page that may ask is usually on another site.
        let page = [("origin", "https://page.example"), ("sec-fetch-site", "cross-site")];
        assert_eq!(post("localhost", &page), 200);
        let get = [("host", "localhost"), ("sec-fetch-site", "cross-site")];
        assert_eq!(status("GET", "/", &get, &[]), 403);
    }

    #[test]
    fn bodies_are_json() {
        let post = |headers: &[(&str, &str)]| {
            status("POST", "/", &[&[("host", "localhost")], headers].concat(), &[])
        };
        let empty = |headers: &[(&str, &str)]| {
            status("DELETE", "/", &[&[("host", "localhost")], headers].concat(), &[])
        };
        for json in [
            "application/json",
            "Application/JSON",
            "application/json; charset=utf-8",
            " application/json ;x",
        ] {
            assert_eq!(post(&[("content-type", json)]), 200, "{json}");
        }
        for other in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
            "application/jsonp",
            "text/plain; application/json",
            "application/json, text/plain",
        ] {
            assert_eq!(post(&[("content-type", other)]), 415, "{other}");
            assert_eq!(empty(&[("content-type", other)]), 415, "{other}, empty");
        }
        let json = ("content-type", "application/json");
        assert_eq!(post(&[json, ("content-type", "text/plain")]), 415);
        let page = ("origin", "http://localhost");
        assert_eq!(post(&[]), 200, "programs that never sent a type");
        assert_eq!(post(&[page]), 415);
        assert_eq!(empty(&[page]), 200);
        let get = [("host", "localhost"), ("content-type", "text/plain")];
        assert_eq!(status("GET", "/", &get, &[]), 200);
    }
}
