//! Files with secrets in them: never over what is there, never through a link, readable by their owner only from the
//! first moment on.
//!
//! A name that others can guess may be taken, or watched, in a directory that others can write to. So a file that is to
//! replace another one is written under a random name beside it, and gets its own when it is whole.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Status};

/// 256 random bits as text.
pub(crate) fn secret() -> Result<String, Failure> {
    let mut bytes = [0_u8; 32];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Failure::new(Status::No, format!("no random numbers: {error}")))?;
    Ok(hex::encode(bytes))
}

/// Makes a directory for its owner only, and those above it, unless they are there.
pub(crate) fn make_directory(dir: &Path) -> Result<(), Failure> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| {
        Failure::new(Status::No, format!("can not make {}: {error}", dir.display()))
    })
}

/// Makes a directory for its owner only, which was not there, among temporary files.
pub(crate) fn make_temporary_directory(name: &str) -> Result<PathBuf, Failure> {
    let dir = std::env::temp_dir().join(format!("{name}-{}", &secret()?[..16]));
    let made = DirBuilder::new().mode(0o700).create(&dir);
    made.map_err(|error| {
        Failure::new(Status::No, format!("can not make {}: {error}", dir.display()))
    })?;
    Ok(dir)
}

/// Writes a new file; never over one that is there, which may be in use.
pub(crate) fn write(path: &Path, content: &str, mode: u32) -> Result<(), Failure> {
    let written = create(path, mode).and_then(|mut file| {
        file.write_all(content.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| can_not_write(path, &error))
}

/// Writes a file in the place of one that may be there.
pub(crate) fn replace(path: &Path, content: &str, mode: u32) -> Result<(), Failure> {
    let mut aside = Aside::create(path, mode)?;
    let written = aside.file.write_all(content.as_bytes());
    written.map_err(|error| can_not_write(path, &error))?;
    aside.publish()
}

/// A file that is to get its name when it is whole, and goes if it never is.
pub(crate) struct Aside {
    pub(crate) file: File,
    place: Option<PathBuf>,
    path: PathBuf,
}

impl Aside {
    /// Beside `path`, under a name that nobody can know before.
    pub(crate) fn create(path: &Path, mode: u32) -> Result<Self, Failure> {
        let Some(name) = path.file_name() else {
            return Err(Failure::usage(format!("{} is no name of a file", path.display())));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", &secret()?[..16]));
        let place = path.with_file_name(hidden);
        let file = create(&place, mode).map_err(|error| can_not_write(path, &error))?;
        Ok(Self { file, place: Some(place), path: path.to_owned() })
    }

    /// Gives it its name, durably.
    pub(crate) fn publish(mut self) -> Result<(), Failure> {
        let Some(place) = self.place.take() else { return Ok(()) };
        let published = self.file.sync_all().and_then(|()| fs::rename(&place, &self.path));
        if published.is_err() {
            self.place = Some(place);
        }
        published
            .and_then(|()| sync_directory_of(&self.path))
            .map_err(|error| can_not_write(&self.path, &error))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // It is of no use, and whoever finds it might think otherwise.
        if let Some(place) = &self.place {
            let _ = fs::remove_file(place);
        }
    }
}

/// A new file; an error also if there is a link of that name, wherever it leads.
fn create(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(mode).open(path)
}

fn sync_directory_of(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn can_not_write(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Status::No, format!("can not write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// GUARANTEES 48: nobody else decides where a file with secrets goes, or reads it.
    #[test]
    fn a_file_is_replaced_when_it_is_whole() {
        let dir = make_temporary_directory("dflockctl-files").unwrap();
        let path = dir.join("backup");
        fs::write(&path, "the one before").unwrap();
        // What another program of the same purpose used to take.
        fs::write(dir.join("backup.part"), "of somebody else").unwrap();
        let mut aside = Aside::create(&path, 0o600).unwrap();
        let there = names(&dir);
        assert_eq!(there.len(), 3, "{there:?}");
        let mode = aside.file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "from the first moment on");
        aside.file.write_all(b"half").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "the one before");
        drop(aside);
        assert_eq!(names(&dir), ["backup", "backup.part"], "given up");

        // A link is replaced, not followed.
        let elsewhere = dir.join("elsewhere");
        fs::write(&elsewhere, "untouched").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(write(&path, "x", 0o600).is_err(), "a link is a name that is taken");
        replace(&path, "whole", 0o600).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "untouched");
        assert_eq!(fs::read_to_string(dir.join("backup.part")).unwrap(), "of somebody else");
        fs::remove_dir_all(&dir).unwrap();
    }
}
