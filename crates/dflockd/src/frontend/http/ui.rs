//! The web page: files of `ui/`, part of the binary.
//!
//! They hold no secret and need no token; every call that the page makes does. The page may load nothing from
//! elsewhere, run nothing that is not in these files, and be framed by nobody. What its files do with data is their
//! own care: keys and client names come from strangers.

use std::hash::{DefaultHasher, Hasher};
use std::sync::LazyLock;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION,
    REFERRER_POLICY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::Shared;
use super::error::ApiError;

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

/// A file of the page.
struct File {
    name: &'static str,
    kind: &'static str,
    content: &'static [u8],
}

macro_rules! files {
    ($($kind:ident $name:literal),* $(,)?) => {
        &[$(File { name: $name, kind: $kind, content: include_bytes!(concat!("../../../ui/", $name)) }),*]
    };
}

/// All of them; the first is the page itself.
const FILES: &[File] = files![
    HTML "index.html",
    STYLE "style.css",
    IMAGE "icon.svg",
    SCRIPT "theme.js",
    SCRIPT "app.js",
    SCRIPT "api.js",
    SCRIPT "dialogs.js",
    SCRIPT "dom.js",
    SCRIPT "events.js",
    SCRIPT "key.js",
    SCRIPT "locks.js",
    SCRIPT "overview.js",
    SCRIPT "parts.js",
    SCRIPT "sessions.js",
];

/// What the page may do. The last two make the browser refuse text that would become markup, should a script ever
/// try that.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// Relative, so that it also works behind a proxy that serves this under a path of its own.
const TO_THE_PAGE: (StatusCode, [(HeaderName, &str); 1]) =
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, "ui/")]);

/// Of each file, so that a browser asks whether it has changed and mostly hears that it has not.
static TAGS: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| FILES.iter().map(File::tag).collect());

impl File {
    fn tag(&self) -> HeaderValue {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.content);
        let tag = format!("\"{:016x}\"", hasher.finish());
        HeaderValue::try_from(tag).expect("digits are a header")
    }
}

pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/", get(async || TO_THE_PAGE))
        .route("/ui", get(async || TO_THE_PAGE))
        .route("/ui/", get(async |headers: HeaderMap| serve("index.html", &headers)))
        .route(
            "/ui/{file}",
            get(async |uri: Uri, headers: HeaderMap| serve(name_in(&uri), &headers)),
        )
}

fn name_in(uri: &Uri) -> &str {
    uri.path().strip_prefix("/ui/").unwrap_or_default()
}

fn serve(name: &str, headers: &HeaderMap) -> Response {
    let Some(at) = FILES.iter().position(|file| file.name == name) else {
        return ApiError::not_found().into_response();
    };
    let (file, tag) = (&FILES[at], &TAGS[at]);
    let fixed = [
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let tagged = [(ETAG, tag.clone())];
    if is_known(headers, tag) {
        return (StatusCode::NOT_MODIFIED, fixed, tagged).into_response();
    }
    (fixed, tagged, [(CONTENT_TYPE, file.kind)], file.content).into_response()
}

/// Whether the browser has this version already.
fn is_known(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let Some(known) = headers.get(IF_NONE_MATCH).and_then(|known| known.to_str().ok()) else {
        return false;
    };
    known.split(',').any(|one| one.trim().trim_start_matches("W/") == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_MAX: usize = 80_000;

    #[test]
    fn the_page_is_small_and_complete() {
        let total: usize = FILES.iter().map(|file| file.content.len()).sum();
        assert!(total < BYTES_MAX, "{total} bytes");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/ui");
        let entries = std::fs::read_dir(folder).expect("the folder is in the repository");
        let mut found: Vec<_> =
            entries.map(|entry| entry.expect("it can be read").file_name()).collect();
        found.sort();
        let mut named: Vec<_> = FILES.iter().map(|file| file.name).collect();
        named.sort_unstable();
        assert_eq!(found, named);
    }

    #[test]
    fn the_page_refers_to_its_own_files_only() {
        for file in FILES {
            let text = std::str::from_utf8(file.content).expect("it is text");
            for (index, line) in text.lines().enumerate() {
                let place = format!("{}:{}", file.name, index + 1);
                for forbidden in
                    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
                {
                    assert!(!line.contains(forbidden), "{place}: {forbidden}");
                }
                let known = line.contains("http://www.w3.org/2000/svg");
                assert!(known || !line.contains("://"), "{place}: an address");
                let Some((_, rest)) = line.split_once("from \"./") else { continue };
                let module = rest.split('"').next().unwrap_or_default();
                assert!(FILES.iter().any(|file| file.name == module), "{place}: no {module}");
            }
        }
    }

    #[test]
    fn a_known_version_is_not_sent_again() {
        let first = serve("index.html", &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[ETAG].clone();
        for (known, status) in [
            (tag.to_str().expect("ASCII").to_owned(), StatusCode::NOT_MODIFIED),
            (format!("\"0\", W/{}", tag.to_str().expect("ASCII")), StatusCode::NOT_MODIFIED),
            ("\"0\"".to_owned(), StatusCode::OK),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(IF_NONE_MATCH, HeaderValue::try_from(known).expect("ASCII"));
            assert_eq!(serve("index.html", &headers).status(), status);
        }
        assert_eq!(serve("../ui.rs", &HeaderMap::new()).status(), StatusCode::NOT_FOUND);
    }
}
