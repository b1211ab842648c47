//! The server as a process: signals, limits, readiness, exit status.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::config::{Config, Parsed, process_env};
use crate::server::runtime_threads;
use crate::{Signal, logging, offline, run};

/// Runs the server with the arguments and the environment of this process until it is told to stop.
pub fn run_process(args: impl IntoIterator<Item = String>) -> ExitCode {
    let args: Vec<String> = args.into_iter().collect();
    if let Some(code) = offline::run(&args) {
        return code;
    }
    let config = match Config::from_args(args, &process_env) {
        Ok(Parsed::Run(config)) => *config,
        Ok(Parsed::Help(text) | Parsed::Version(text)) => {
            #[expect(clippy::print_stdout, reason = "what was asked for")]
            {
                println!("{}", text.trim_end());
            }
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("configuration error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let _log = logging::init(config.log_format, config.debug);
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let message = panic.payload_as_str().unwrap_or("unknown");
        // Directly as well: if the process ends now, the log's own thread does not get to it.
        eprintln!("panic at {place}: {message}");
        tracing::error!(place, message, "panic");
    }));
    for warning in config.warnings().into_iter().chain(config.warnings_of_files()) {
        tracing::warn!("{warning}");
    }
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "file-descriptor limit not raised");
    }
    // A dump would hold every token.
    if let Err(error) = rlimit::setrlimit(rlimit::Resource::CORE, 0, 0) {
        tracing::warn!(%error, "core dumps not switched off");
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = match runtime.worker_threads(runtime_threads(&config)).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(async {
        let signals = watch_signals()?;
        let running = run(config).await?;
        notify(&[sd_notify::NotifyState::Ready]);
        running.serve(signals, || notify(&[sd_notify::NotifyState::Stopping])).await
    });
    // Not waiting for a thread that may be busy with a text nobody will read.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "stopped");
            eprintln!("dflockd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// SIGINT, SIGTERM and SIGHUP as they come.
///
/// # Errors
///
/// If a handler can not be set.
pub fn watch_signals() -> std::io::Result<mpsc::UnboundedReceiver<Signal>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let kinds = [
        (SignalKind::interrupt(), Signal::Terminate),
        (SignalKind::terminate(), Signal::Terminate),
        (SignalKind::hangup(), Signal::Reload),
    ];
    for (kind, meaning) in kinds {
        let mut stream = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() && sender.send(meaning).is_ok() {}
        });
    }
    Ok(receiver)
}

/// Tells systemd, if it started us.
fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd not notified");
    }
}
