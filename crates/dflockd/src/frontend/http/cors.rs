//! Which pages may read answers: CORS.

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN,
    VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;

const METHODS: &str = "GET, POST, DELETE, OPTIONS";
const METHODS_AND_PUT: &str = "GET, POST, PUT, DELETE, OPTIONS";
const HEADERS: &str = "Authorization, Content-Type, X-Dflockd-Session";
const HEADERS_AND_MORE: &str =
    "Authorization, Content-Type, X-Dflockd-Session, X-Dflockd-Admin, Last-Event-ID, traceparent";
const MAX_AGE: &str = "300";

/// Whose pages may read answers; empty is nobody's.
pub(crate) struct Cors {
    origins: Vec<String>,
    all: bool,
}

/// What an answer to a page says.
pub(crate) struct Allowed {
    origin: HeaderValue,
    methods: &'static str,
    headers: &'static str,
}

impl Cors {
    pub(crate) fn new(origins: &[String]) -> Self {
        let all = origins.iter().any(|origin| origin == "*");
        Self { origins: origins.to_vec(), all }
    }

    pub(crate) fn is_active(&self) -> bool {
        !self.origins.is_empty()
    }

    /// Whether pages of this origin may use the interface.
    pub(crate) fn admits(&self, origin: &HeaderValue) -> bool {
        let text = origin.to_str().unwrap_or_default();
        self.all || self.origins.iter().any(|known| known.eq_ignore_ascii_case(text))
    }

    /// Whether all pages may.
    pub(crate) fn admits_all(&self) -> bool {
        self.all
    }

    /// What is answered to a request with these headers; nothing unless a page asks that may.
    pub(crate) fn allowed(&self, headers: &HeaderMap) -> Option<Allowed> {
        let origin = headers.get(ORIGIN)?;
        let origin = if self.all {
            HeaderValue::from_static("*")
        } else {
            self.admits(origin).then(|| origin.clone())?
        };
        // Browsers ask for what goes beyond the usual, and are told only then.
        let put = headers.get(ACCESS_CONTROL_REQUEST_METHOD).is_some_and(|m| m == "PUT");
        let wanted = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).and_then(|h| h.to_str().ok());
        let mut names = wanted.unwrap_or_default().split(',').map(str::trim);
        let usual = |name: &str| {
            HEADERS.split(", ").any(|usual| usual.eq_ignore_ascii_case(name)) || name.is_empty()
        };
        Some(Allowed {
            origin,
            methods: if put { METHODS_AND_PUT } else { METHODS },
            headers: if names.all(usual) { HEADERS } else { HEADERS_AND_MORE },
        })
    }

    /// Whether a browser asks what it may do.
    pub(crate) fn is_preflight(&self, method: &Method, headers: &HeaderMap) -> bool {
        self.is_active()
            && *method == Method::OPTIONS
            && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
    }
}

impl Allowed {
    pub(crate) fn add_headers(self, response: &mut Response) {
        let headers = response.headers_mut();
        if self.origin != "*" {
            headers.append(VARY, HeaderValue::from_static("Origin"));
        }
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, self.origin);
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(self.methods));
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(self.headers));
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
    }
}

/// The answer to a preflight, without what it may.
pub(crate) fn preflight() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(origins: &[&str], request: &[(&'static str, &str)]) -> Vec<String> {
        let origins: Vec<_> = origins.iter().map(ToString::to_string).collect();
        let headers = request.iter().map(|(name, value)| {
            let name = axum::http::HeaderName::from_static(name);
            (name, HeaderValue::from_str(value).unwrap())
        });
        let mut response = preflight();
        if let Some(allowed) = Cors::new(&origins).allowed(&headers.collect()) {
            allowed.add_headers(&mut response);
        }
        let mut told: Vec<_> = response
            .headers()
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        told.sort();
        told
    }

    #[test]
    fn an_origin_is_echoed() {
        let usual = [
            "access-control-allow-headers: Authorization, Content-Type, X-Dflockd-Session",
            "access-control-allow-methods: GET, POST, DELETE, OPTIONS",
            "access-control-allow-origin: https://a.example",
            "access-control-max-age: 300",
            "vary: Origin",
        ];
        let origins = ["https://a.example", "http://b:81"];
        assert_eq!(told(&origins, &[("origin", "https://a.example")]), usual);
        assert!(told(&origins, &[("origin", "https://c.example")]).is_empty());
        assert!(told(&origins, &[]).is_empty());
        assert!(told(&[], &[("origin", "https://a.example")]).is_empty());
    }

    #[test]
    fn all_origins() {
        let told = told(&["*"], &[("origin", "https://a.example")]);
        assert_eq!(told[2], "access-control-allow-origin: *");
        assert_eq!(told.len(), 4);
    }

    #[test]
    fn what_is_asked_for() {
        let asked = [
            ("origin", "http://b:81"),
            ("access-control-request-method", "PUT"),
            ("access-control-request-headers", "content-type, x-dflockd-admin"),
        ];
        let told = told(&["http://b:81"], &asked);
        assert!(told[0].contains("X-Dflockd-Admin"));
        assert!(told[1].contains("PUT"));
    }
}
